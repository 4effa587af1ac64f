"""Our side of the supervisor's socket, with a real supervisor below a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from rankwise.launcher.supervisor_protocol import Request, make_supervisor_socket
from support import wait_until

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

_KEEPS = """
import socket, sys
from rankwise.launcher.supervisor import keep
sock, link, pid = map(int, sys.argv[1:])
keep(socket.socket(fileno=sock), (pid, socket.socket(fileno=link)), frozenset())
"""


def test_more_orders_than_the_socket_holds_are_all_carried_out() -> None:
    """With orders and answers that fill both directions of the socket, every process starts and its end is heard; afterwards orphans are left to init as before."""
    done = subprocess.run([sys.executable, "-c", _STARTS_MANY], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [sorted(f"{number}.0" for number in range(40)), True, False]


def test_a_process_that_ends_before_its_pid_was_told_has_ended_as_it_did() -> None:
    """A resident server forks processes before they are asked for: the supervisor may reap one before it hears which it was."""
    ours, theirs = make_supervisor_socket()
    server, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [theirs.fileno(), link.fileno()]
    gone = subprocess.Popen(["true"])
    gone.wait()
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, "-c", _KEEPS, *map(str, (*fds, gone.pid))], pass_fds=fds), ours, server:
        theirs.close()
        link.close()
        ours.settimeout(20)
        server.settimeout(20)
        server.send(json.dumps({"ready": 1, "num_modules": 1, "seconds": 1.0}).encode())
        for tag, argv, forks in (
            ("0.0", ["train.py"], "script"),
            ("orphan", ["sh", "-c", "sh -c 'sleep 0.3; exit 3' & echo $!"], ""),
        ):
            request = Request(op="start", tag=tag, argv=argv, forks=forks)
            socket.send_fds(ours, [json.dumps(asdict(request)).encode()], [0, writing, 2])
        _, fds, _, _ = socket.recv_fds(server, 1 << 16, 8)
        for fd in (writing, *fds):
            os.close(fd)
        with os.fdopen(reading) as file:
            pid = int(file.readline())
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        server.send(json.dumps({"forked": "0.0", "pid": pid}).encode())
        said: list[dict[str, dict[str, object]]] = []
        while len(said) < 5:  # the server is ready; both have started and ended
            said.append(json.loads(ours.recv(1 << 16)))
        ends = [one["Ended"] for one in said if "Ended" in one]
        assert [end["code"] for end in ends if end["tag"] == "0.0"] == [3]
