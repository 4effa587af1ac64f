"""A text stream that may break under us: its reader leaves, and the training goes on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO, final


@final
class Outlet:
    """Writes text as long as somebody takes it; also what rich is given as its file.

    Args:
        stream: Where to; None: standard error as it is now.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        # A process without a console has None as its standard error.
        self._stream: TextIO | None = stream if stream is not None else sys.stderr
        self.encoding: str = getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write ``text``; signs that the stream can't show are spelled out, and after an error nothing more is written."""
        if self._stream is not None:
            try:
                if not text.isascii():
                    text = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
                self._stream.write(text)
            except (
                OSError,
                ValueError,
            ):  # the reader is gone, the terminal hung up, the disk is full, the file closed
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Hand on what is buffered."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        """Write nothing any more, and empty the stream's buffers: at exit Python would try once more, and exit with 120."""
        stream, self._stream = self._stream, None
        with suppress(OSError, ValueError, AttributeError):
            fd = stream.fileno()  # type: ignore[union-attr]
            is_inheritable, kept = os.get_inheritable(fd), os.dup(fd)
            try:
                with Path(os.devnull).open("wb") as nowhere:
                    os.dup2(nowhere.fileno(), fd, inheritable=is_inheritable)
                stream.flush()  # type: ignore[union-attr]
            finally:
                os.dup2(kept, fd, inheritable=is_inheritable)
                os.close(kept)

    def say(self, line: str) -> None:
        """Write one line, at once."""
        self.write(f"{line}\n")
        self.flush()

    def isatty(self) -> bool:
        """Tell whether a terminal is there."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the descriptor; rich asks for it on Windows.

        Raises:
            OSError: There is none.
        """
        if self._stream is None:
            raise OSError("nothing reads here any more")
        return self._stream.fileno()


_hinted: set[str] = set()


def hint(outlet: Outlet, text: str) -> None:
    """Say what would be better with another package, once in a process."""
    if text not in _hinted:
        _hinted.add(text)
        outlet.say(f"rankwise: {text}")


def warn(text: str) -> None:
    """Say on standard error what a user should know; loggers live on rank 0."""
    Outlet().say(f"rankwise: warning: [rank 0] {text}")
