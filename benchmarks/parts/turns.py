"""Lets several trainings run in one process in turn, some steps of each at a time: a drift of the machine then falls on all of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Lane:
    """A training in a thread of its own, which runs only while it is its turn.

    A framework owns its loop and can't be asked to stop in the middle; but its loss function is ours, and can wait there.

    Args:
        work: The training; calls ``pause`` where it can be left.
        begin: Called in the thread at the beginning of each turn after a pause.
    """

    def __init__(self, work: Callable[[], None], *, begin: Callable[[], None]) -> None:
        self._work, self._begin = work, begin
        self._may, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self.is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self) -> None:
        """Let it run to its next pause, or to its end; raise what it raises."""
        self._may.release()
        self._has_paused.acquire()
        if self.is_over:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """In the thread: wait for the next turn."""
        self._has_paused.release()
        self._may.acquire()
        self._begin()

    def _run(self) -> None:
        self._may.acquire()
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - goes on in the thread that waits for it
            self._error = error
        finally:
            self.is_over = True
            self._has_paused.release()
