"""The words in which a rank and its launcher speak of a job that stops early, to go on later."""

from __future__ import annotations

import signal

#: What a rank, and then the launcher, exits with when the job has stopped by itself and wants to be started again:
#: EX_TEMPFAIL of sysexits.h, "try again later".
REQUEUE = 75

# Caught by ranks that call should_stop(), and by nobody else: so the launcher, which reads in /proc what a process
# catches, knows that SIGTERM does not end them, and uses this one where there is nothing to save any more.
# Neighbour of the signal that asks for stacks (base/osdoor.py).
END_SIGNAL: int | None = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else None
