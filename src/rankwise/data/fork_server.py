"""Loaded into a fork server, lets it outlive a scheduler's signals; of its children only our workers inherit that.

The server blocks the signals. Other children, such as workers of torch's own loader, could not be ended by ``terminate()`` then,
and multiprocessing would wait for them without a bound: theirs are unblocked. Importing this module is what does it; nothing but
a fork server should.
"""

from __future__ import annotations

import signal
from multiprocessing import current_process
from multiprocessing.util import register_after_fork

from rankwise.data.workers import HELD, is_worker


def _release(_: object) -> None:
    if not is_worker(current_process()):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


# The registry holds it weakly.
register_after_fork(_release, _release)
signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
