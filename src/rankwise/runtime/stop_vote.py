"""At which call of ``should_stop()`` do all ranks stop: one rank's part in finding it out, without I/O.

All ranks call ``should_stop()`` once a step, so the n-th call of one rank is the same step as the n-th of any other. On
a request to stop, each rank *answers* with the number of a call that it has not made yet, and from then on its calls wait
until all have answered. The greatest answer is the call at which all stop. This is right for three reasons:

- No rank has passed it: a rank that has made n calls answers at least n + 1, and makes no further one before it knows.
- All reach it: a rank that is behind makes its calls as ever, and each returns False until that number.
- Nobody waits in a circle. A waiting call needs only that the other ranks answer; that is done by their threads, while
  their main threads may be in a collective or in a long step. A rank that has not yet come to its first call has no thread
  that could answer, but what it does before that needs nothing from a rank that has already come to its first.
"""

from __future__ import annotations

import threading
from typing import final


@final
class StopVote:
    """Counts the calls of this rank, answers once, and tells each call what it returns.

    The main thread calls ``begin_call`` and ``wait_settled``, another thread ``answer``, ``settle`` and ``give_up``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._num_calls = 0
        self._answer: int | None = None
        self._agreed: int | None = None

    def begin_call(self) -> bool | None:
        """Count a call.

        Returns:
            What the call returns; None if it must wait for the others' answers.
        """
        with self._lock:
            self._num_calls += 1
            if self._agreed is not None:
                return self._num_calls >= self._agreed
            return False if self._answer is None else None

    def answer(self) -> int:
        """Return the first call that this rank has not made: from now on its calls wait."""
        with self._lock:
            if self._answer is None:
                self._answer = self._num_calls + 1
            return self._answer

    def settle(self, agreed: int) -> None:
        """Take the call at which all ranks stop: the greatest answer."""
        with self._lock:
            self._agreed = agreed
        self._over.set()

    def give_up(self) -> None:
        """Let a waiting call go on: there will be no agreement."""
        self._over.set()

    def wait_settled(self, timeout_s: float) -> bool | None:
        """Wait for the agreement.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            What the call that was begun last returns; None if there is no agreement.
        """
        self._over.wait(timeout_s)
        with self._lock:
            return None if self._agreed is None else self._num_calls >= self._agreed
