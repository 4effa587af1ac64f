"""Show on the console what ranks write to their log files: whole lines, each with its rank in front."""

from __future__ import annotations

import os
import socket
import string
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.launcher.console import Console

_LOOK_EVERY_S = 0.05
_CHUNK_BYTES = 1 << 16
#: A "line" longer than this is shown in parts: it must not fill the memory.
_LONGEST_LINE_BYTES = 1 << 20
#: A progress bar redraws its line; on a console that many ranks share one line a second is enough.
_PROGRESS_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Followed:
    """One log file that is being shown."""

    path: Path
    prefix: bytes
    to_fd: int
    fd: int | None = None
    half: bytes = b""
    shown_progress_s: float = 0.0
    filters: tuple[bytes, ...] = field(default_factory=tuple)
    copy_to: Path | None = None


@final
class Tee:
    """A thread that follows log files. Ranks write to the files, never to us: a slow console slows no rank."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._files: list[_Followed] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankwise-tee", daemon=True)

    def add(
        self,
        path: Path,
        *,
        to_fd: int,
        prefix: str,
        filters: tuple[str, ...] = (),
        copy_to: Path | None = None,
    ) -> None:
        """Follow ``path``; lines that hold one of ``filters`` are also appended to ``copy_to``."""
        words = tuple(word.encode() for word in filters)
        self._files.append(_Followed(path=path, prefix=prefix.encode(), to_fd=to_fd, filters=words, copy_to=copy_to))

    def start(self) -> None:
        """Begin to follow."""
        if self._files:
            self._thread.start()

    def finish(self, timeout_s: float = 60.0) -> None:
        """Show what is still unshown, then stop; a console that takes nothing is given up after a while."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            stopping = self._stop.is_set()  # asked before the last look, so that nothing is missed
            moved = [self._follow(file) for file in self._files]
            if stopping and not any(moved):
                break
            if not any(moved):
                self._stop.wait(_LOOK_EVERY_S)
        for file in self._files:
            if file.half:
                self._show(file, [file.half.rstrip(b"\r").rpartition(b"\r")[2]])
            if file.fd is not None:
                os.close(file.fd)

    def _follow(self, file: _Followed) -> bool:
        """Move one chunk, so that a rank that prints much does not starve the others."""
        if file.fd is None:
            try:
                file.fd = os.open(file.path, os.O_RDONLY)
            except OSError:
                return False
        data = os.read(file.fd, _CHUNK_BYTES)
        if not data:
            return False
        *lines, file.half = (file.half + data).split(b"\n")
        if len(file.half) > _LONGEST_LINE_BYTES:
            lines, file.half = [*lines, file.half], b""
        # A line that is redrawn shows, as on a terminal, what stands there in the end.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        now = time.monotonic()
        if b"\r" in file.half and now - file.shown_progress_s >= _PROGRESS_EVERY_S:
            drawn, _, file.half = file.half.rpartition(b"\r")
            if drawn := drawn.rpartition(b"\r")[2]:
                shown.append(drawn)
                file.shown_progress_s = now
        self._show(file, shown)
        return True

    def _show(self, file: _Followed, lines: list[bytes]) -> None:
        if not lines:
            return
        self._console.write(file.to_fd, b"".join(file.prefix + line + b"\n" for line in lines))
        if file.copy_to is not None:
            chosen = [line for line in lines if any(word in line for word in file.filters)]
            if chosen:
                with suppress(OSError), file.copy_to.open("ab") as copy:
                    copy.write(b"".join(file.prefix + line + b"\n" for line in chosen))


def make_prefix(template: str, *, role_name: str, rank: int, local_rank: int) -> str:
    """Fill torchrun's prefix template; unknown names stay as they are."""
    return string.Template(template).safe_substitute(
        role_name=role_name, rank=rank, local_rank=local_rank, hostname=socket.gethostname()
    )
