"""`python SCRIPT.py` of a shell by a fork of a Python that has imported what it needs; `find_socket` of `python_forks.py` gives that one.

Its first argument is the socket's descriptor. It stands for the fork: passes signals on, and ends as it does.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

_ANSWER_BYTES = 16


def _main() -> None:
    reading, writing = os.pipe()
    _, fd, program, *args = sys.argv
    order = {"program": program, "args": args, "env": dict(os.environ), "folder": str(Path.cwd()), "fds": [], "own_session": False, "takes_terminal": False}  # fmt: skip
    with socket.socket(fileno=int(fd)) as sock:
        socket.send_fds(sock, [json.dumps(order).encode()], [writing, 0, 1, 2])
    os.close(writing)
    pid = int(os.read(reading, _ANSWER_BYTES))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(os.read(reading, _ANSWER_BYTES) or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


_main()
