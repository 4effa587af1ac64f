"""Processes that are forked before they are asked for, while a run's launcher still imports what it needs: each waits for its order.

It stands alone, as ``server.py`` does, and is loaded by path.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_ORDER, _MOST_FDS = 1 << 20, 16


class Spares:
    """Those of one warm server; each ends when the server does, or has no use for it.

    Args:
        fork: Forks this process.
    """

    def __init__(self, fork: Callable[[], int]) -> None:
        self._fork = fork
        self._waiting: list[socket.socket] = []

    def fork(self, number: int) -> tuple[dict[str, Any], list[int], tuple[int, int]] | None:
        """Fork some, by a process between, so that the supervisor adopts them; fewer where the system allows no more.

        Returns:
            In one of them, once it is asked for: the order, its descriptors, and the pids of the server and of the process
            between. None in the server.
        """
        pairs: list[tuple[socket.socket, socket.socket]] = []
        me, middle = os.getpid(), -1
        with contextlib.suppress(OSError):
            pairs += [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(number)]
            middle = self._fork()
        if middle:
            self._waiting += [ours for ours, _ in pairs]
            for _, theirs in pairs:
                theirs.close()
            return None
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ours in (*self._waiting, *(ours for ours, _ in pairs)):
            ours.close()  # the end of the server's copy ends a spare
        middle = os.getpid()
        for _, theirs in pairs:
            try:
                pid = os.fork()
            except OSError:
                break
            if not pid:
                for _, other in pairs:
                    if other is not theirs:
                        other.close()
                return (*_wait_order(theirs), (me, middle))
        os._exit(0)

    def use(self, order: dict[str, Any], fds: list[int]) -> bool:
        """Give an order to one of them, which then tells the supervisor; False if there is none."""
        while self._waiting:
            with self._waiting.pop(0) as spare, contextlib.suppress(OSError):  # it was killed
                if spare.recv(1):
                    socket.send_fds(spare, [json.dumps(order).encode()], fds)
                    return True
        return False


def _wait_order(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Say that there is somebody to be asked, and wait until the server asks; it may end instead."""
    with sock:
        try:
            sock.send(b"!")
            data, fds, _, _ = socket.recv_fds(sock, _LONGEST_ORDER, _MOST_FDS)
        except ConnectionError:
            os._exit(0)
    if not data:
        os._exit(0)
    return json.loads(data), fds
