"""Our side of the supervisor's socket, with a real supervisor below a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.linux

_STARTS_MANY = """
import json, sys
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.os_calls import adopts_orphans
from rankwise.launcher import supervisor
from rankwise.launcher.signals import Signals
from rankwise.launcher.workers import Command, Ended
supervisor.DATAGRAM_BYTES = 4608  # the smallest buffer that Linux gives: full after a handful of messages
from rankwise.launcher.supervised_workers import SupervisedWorkers
workers = SupervisedWorkers(Signals(("SIGTERM",)), SYSTEM_CLOCK)
for number in range(40):
    workers.start(f"{number}.0", Command(argv=("/bin/true",)))
ended = []
while len(ended) < 40:
    ended += [change.tag for change in workers.wait_change(10) if isinstance(change, Ended)]
workers.sweep(1)
adopts = adopts_orphans()
workers.close()
print(json.dumps([sorted(ended), adopts, adopts_orphans()]))
"""


def test_more_orders_than_the_socket_holds_are_all_carried_out() -> None:
    """With orders and answers that fill both directions of the socket, every process starts and its end is heard; afterwards orphans are left to init as before."""
    done = subprocess.run([sys.executable, "-c", _STARTS_MANY], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [sorted(f"{number}.0" for number in range(40)), True, False]
