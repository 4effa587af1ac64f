"""A disk that fails at one chosen operation: it kills the process there, is full, or breaks."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Literal, NoReturn, final

from rankwise.checkpoint.disk import REAL_DISK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def die() -> NoReturn:
    """End this process as a power cut would: at once, with nothing tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL came back")


def fail(number: int) -> Callable[[], NoReturn]:
    """Return a fault that is an error of the system."""

    def raise_it() -> NoReturn:
        raise OSError(number, os.strerror(number))

    return raise_it


@final
class FaultyDisk:
    """The real disk, but for one operation.

    Args:
        at: Which operation, from 1; 0: none, only count.
        fault: What happens there, and at all later ones if ``stays``.
        when: Before the operation, when it is half done (a write, a removal), or after it.
        only: Count these kinds of operations only.
        stays: Whether the fault stays.
    """

    def __init__(
        self,
        at: int,
        fault: Callable[[], object] = die,
        *,
        when: Literal["before", "halfway", "after"] = "before",
        only: tuple[str, ...] = (),
        stays: bool = False,
    ) -> None:
        self.at, self.fault, self.when, self.only, self.stays = at, fault, when, only, stays
        #: The kind of each operation that was counted.
        self.done: list[str] = []

    def _around(self, kind: str, do: Callable[[], Any], do_half: Callable[[], object] | None = None) -> Any:
        if self.only and kind not in self.only:
            return do()
        self.done.append(kind)
        count = len(self.done)
        if not self.at or count < self.at or (count > self.at and not self.stays):
            return do()
        if self.when == "halfway" and do_half is not None:
            do_half()
        elif self.when == "after":
            do()
        self.fault()
        return do() if self.when != "after" else None

    def make_folder(self, path: Path) -> None:
        self._around("make_folder", lambda: REAL_DISK.make_folder(path))

    def write(self, fd: int, data: memoryview) -> int:
        half = data[: len(data) // 2]
        return int(self._around("write", lambda: REAL_DISK.write(fd, data), lambda: REAL_DISK.write(fd, half)))

    def sync(self, fd: int) -> None:
        self._around("sync", lambda: REAL_DISK.sync(fd))

    def sync_folder(self, path: Path) -> None:
        self._around("sync_folder", lambda: REAL_DISK.sync_folder(path))

    def rename(self, source: Path, target: Path) -> None:
        self._around("rename", lambda: REAL_DISK.rename(source, target))

    def remove(self, path: Path) -> None:
        def remove_half() -> None:
            for one in sorted(path.iterdir())[1:] if path.is_dir() else ():
                one.unlink()

        self._around("remove", lambda: REAL_DISK.remove(path), remove_half)
