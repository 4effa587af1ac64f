"""torchrun's watchdog over the timers that ranks set themselves (torch.distributed.elastic.timer): torch's own server, in the helper process.

It is asked for as under torchrun: ``TORCHELASTIC_ENABLE_FILE_TIMER=1``, and ``TORCHELASTIC_TIMER_FILE`` for a path of one's own.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, final

from rankwise.base.environ import environ

if TYPE_CHECKING:
    from rankwise.launcher.helper import Helper

_ENABLE, _FILE = "TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE"


def are_asked_for() -> bool:
    """Whether ranks may set timers."""
    return environ().get(_ENABLE) == "1"


@final
class Timers:
    """The timers of this node's ranks, over all attempts: whoever lets one expire is killed by the signal that it has named.

    Args:
        helper: Has torch.
        run_id: The job's.

    Raises:
        LaunchError: torch's server could not be started.
    """

    def __init__(self, helper: Helper, run_id: str) -> None:
        own = Path(tempfile.gettempdir()) / f"rankwise_timers_{os.getpid()}_{os.urandom(4).hex()}"
        self._helper, self._path = helper, Path(environ().get(_FILE) or own)
        helper.ask("serve_timers", timeout_s=120, path=str(self._path), run_id=run_id)

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """What the ranks' environment has beyond ours."""
        return ((_FILE, str(self._path)),)

    def find_expired(self, pid: int) -> str:
        """Return the timer for which a rank was killed; empty if it was not."""
        expired = self._helper.news("expired")
        scope = str(expired.get(str(pid), "")) if isinstance(expired, dict) else ""
        # A timer without a name gets that of the line which has called ``expires``; by torch's mistake it is one of
        # contextlib's.
        return "its timer without a scope=" if "contextlib.py#" in scope else f"its timer {scope!r}" if scope else ""

    def close(self) -> None:
        """Remove the pipe; the server ends with the helper."""
        with suppress(OSError):
            self._path.unlink()


def open_timers(helper: Helper | None, run_id: str) -> Timers | None:
    """Serve timers if ranks may set some; None if not."""
    return Timers(helper, run_id) if helper is not None and are_asked_for() else None
