"""Signals sent to the launcher, remembered until the loop looks: no work is done inside a handler."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, final

from rankwise.base.os_calls import IS_WINDOWS

if TYPE_CHECKING:
    from types import FrameType

_PASSED_ON = ("SIGUSR1", "SIGUSR2")


@final
class Signals:
    """Catches signals while it is open; a descriptor wakes whoever waits in a selector.

    Args:
        ending: Names of the signals that end the job. A SIGHUP that was ignored when we started (nohup) stays so.
    """

    def __init__(self, ending: tuple[str, ...]) -> None:
        self._pending: list[int] = []
        self._old: dict[int, signal._HANDLER] = {}
        self._wake_read, self._wake_write = os.pipe()
        if not IS_WINDOWS:  # nobody waits in a selector there
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
        ends = {getattr(signal, name) for name in ending if hasattr(signal, name)}
        #: Signals that reach the ranks and end nothing.
        self.passed_on = {getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)} - ends
        wanted = ends | self.passed_on
        for number in wanted:
            # A shell's `&` ignores SIGINT and SIGQUIT for us, and a `kill -INT` is meant all the same; only an
            # ignored SIGHUP is somebody's wish (nohup).
            if number != getattr(signal, "SIGHUP", None) or signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._note)
        if hasattr(signal, "SIGWINCH"):
            self._old[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)
        if IS_WINDOWS:
            return
        with suppress(BlockingIOError):  # the pipe is full: whoever waits is awake already
            os.write(self._wake_write, b"!")

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal has come."""
        return self._wake_read

    @property
    def has_pending(self) -> bool:
        """Whether ``take`` would return something."""
        return bool(self._pending)

    def take(self) -> list[int]:
        """Return the signals that came since the last call, in order."""
        with suppress(BlockingIOError):
            while not IS_WINDOWS and os.read(self._wake_read, 4096):
                pass
        came, self._pending = self._pending, []
        return came

    def close(self, *, deaf: bool = False) -> None:
        """Give the handlers back.

        Args:
            deaf: Ignore the signals instead: the process ends, and how must not change any more. Python's end would
                give back a handler, and let a signal that is repeated kill us; it leaves alone what is ignored.
        """
        for number, handler in self._old.items():
            signal.signal(number, signal.SIG_IGN if deaf else handler)
        os.close(self._wake_read)
        os.close(self._wake_write)
