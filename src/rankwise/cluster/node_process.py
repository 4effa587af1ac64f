"""One node of a job that no scheduler holds: runs its launcher there, and ends it when whoever started it is gone.

ssh forwards no signal, and leaves programs behind when it is cut off. So this stands between ssh and the launcher: it reads what to do from
standard input, which ends with whoever writes there, however that ends. A cut network ends nothing: hence a word every few seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import environ
from rankwise.base.os_calls import IS_LINUX, KILL_SIGNAL, die_with_parent, wait_ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.base.clock import Clock

#: The words: go on; stop in time, then; end now.
ALIVE, NOTICE, KILL = b"a", b"t", b"k"
#: How often a word comes; and the silence that means a cut network.
ALIVE_EVERY_S, _SILENT_S = 5.0, 60.0
_LOOK_S = 0.1


@final
class Orders:
    """What is said to a node.

    Args:
        fd: Where; whoever speaks there is gone once it ends, or is silent for too long.
        clock: Where the time comes from.
    """

    def __init__(self, fd: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._fd, self._clock = fd, clock
        self._heard_s, self.is_gone = clock.monotonic(), False

    def read(self) -> bytes:
        """Wait a moment for words, and return them."""
        if self.is_gone:
            self._clock.sleep(_LOOK_S)
            return b""
        ready = wait_ready([self._fd], _LOOK_S)
        now_s = self._clock.monotonic()
        words = os.read(self._fd, 4096) if ready else b""
        if words:
            self._heard_s = now_s
        self.is_gone = not words and (bool(ready) or now_s - self._heard_s > _SILENT_S)
        return words


def main(argv: Sequence[str]) -> int:
    """Run the launcher, and return its exit code; the first line of standard input has the environment, as JSON.

    Args:
        argv: Seconds from the notice to the kill, then the launcher's words.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return 1  # gone before it has said anything
        line += byte
    env = {**environ(), **json.loads(line)}
    orders, grace_s, end_s = Orders(0), float(argv[0]), float("inf")
    launcher = subprocess.Popen(
        argv[1:], env=env, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent if IS_LINUX else None,  # noqa: PLW1509 - no threads here
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        # The host shuts down, or its user ends us: the launcher has its notice, and says how it ends.
        signal.signal(number, lambda number, _: launcher.send_signal(number))
    while launcher.poll() is None:
        words = orders.read()
        if (NOTICE in words or orders.is_gone) and end_s == float("inf"):
            launcher.send_signal(signal.SIGTERM)
            end_s = SYSTEM_CLOCK.monotonic() + grace_s
        if KILL in words or SYSTEM_CLOCK.monotonic() > end_s:
            launcher.send_signal(KILL_SIGNAL)
            launcher.wait()
    code = launcher.returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
