"""What a launcher takes for `subprocess.Popen` of its helper, which is forked off a Python that has imported torch: the import would be two thirds of all that a node's launcher costs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

_ANSWER_BYTES = 16


class ForkedHelper:
    """A helper; it ends with this process, as the real one does."""

    def __init__(self, fd: int, script: str, host_pid: int | None) -> None:
        asks, answers, (self._end, theirs) = os.pipe(), os.pipe(), os.pipe()
        order = {"program": script, "args": [], "env": dict(os.environ), "folder": str(Path.cwd()), "fds": [], "own_session": True, "takes_terminal": False, "host_pid": host_pid}  # fmt: skip
        with socket.socket(fileno=os.dup(fd)) as sock:
            socket.send_fds(sock, [json.dumps(order).encode()], [theirs, asks[0], answers[1], 2])
        for one in (theirs, asks[0], answers[1]):
            os.close(one)
        self.pid = int(os.read(self._end, _ANSWER_BYTES))
        self.stdin, self.stdout = os.fdopen(asks[1], "w"), os.fdopen(answers[0])
        self._code: int | None = None

    def kill(self) -> None:
        """End it, if it runs."""
        if self._code is None and not select.select([self._end], [], [], 0)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(int(os.read(self._end, _ANSWER_BYTES) or signal.SIGKILL))
            os.close(self._end)
        return self._code


def replace_popen(helper: Any, fd: int) -> None:
    """Have the launcher that is imported here fork its helper off whoever is at the other end of a socket."""

    def start(command: list[str], **options: Any) -> Any:
        if command[:2] != [sys.executable, "-u"]:
            return subprocess.Popen(command, **options)
        return ForkedHelper(fd, command[2], os.getpid() if network.readlink() != usual else None)

    network = Path("/proc/self/ns/net")
    usual = network.readlink()
    os.set_inheritable(fd, False)
    helper.subprocess = types.SimpleNamespace(PIPE=subprocess.PIPE, Popen=start)
