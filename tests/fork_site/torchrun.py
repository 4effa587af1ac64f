"""What pip installs as `torchrun`, to be forked; its ranks are forked, too, off whoever is at the other end of a socket, where a start would be no different.

Its first argument is the socket's descriptor.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main


class _ForkedRank:
    """What torchrun uses of `subprocess.Popen`, for a rank that it has adopted."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            time.sleep(0.005)
        return code


def _needs_torch(word: str) -> bool:
    """Whether a word of a command is a script for which a fork is cheaper than a start."""
    return word.endswith(".py") and Path(word).is_file() and b"torch" in Path(word).read_bytes()


def _fork_ranks(sock: socket.socket) -> None:
    """Have torchrun fork its ranks."""

    def start(args: tuple[str, ...], env: dict[str, str], stdout: Any, stderr: Any, **options: Any) -> Any:
        program, *others = args[2:] if args[:2] == (sys.executable, "-u") else [""]
        if program == "-m" and others[0] == "rankwise.watch" and "-m" not in others[1:]:
            program, *others = others
        if program != "-m" and any(map(_needs_torch, (program, *others))):
            order = {"program": program, "args": others, "env": env, "folder": str(Path.cwd()), "fds": [], "own_session": True, "takes_terminal": False}  # fmt: skip
            socket.send_fds(sock, [json.dumps(order).encode()], [0, *(number if file is None else file.fileno() for number, file in ((1, stdout), (2, stderr)))])  # fmt: skip
            answer = sock.recv(100)
            if answer.isdigit():
                return _ForkedRank(int(answer))
        return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, **options)

    subprocess_handler.Popen = start  # type: ignore[assignment,misc]


if __name__ == "__main__":
    _fd = int(sys.argv.pop(1))
    os.set_inheritable(_fd, False)
    _fork_ranks(socket.socket(fileno=_fd))
    main()
