"""A job of this node alone: nobody to meet, only a port to choose."""

from __future__ import annotations

import errno
import uuid
from typing import TYPE_CHECKING, final

from rankwise.base.errors import UsageError
from rankwise.base.host import find_port_holder, is_loopback, listen_tcp
from rankwise.base.os_calls import IS_WINDOWS
from rankwise.launcher.rendezvous.assignment import Assignment

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from rankwise.launcher.spec import LaunchSpec


@final
class SingleNode:
    """Binds a port for the store before any process is started, anew for every attempt."""

    def __init__(self, spec: LaunchSpec, num_ranks: int, *, rank0_serves: bool = False) -> None:
        self._spec, self._num_ranks = spec, num_ranks
        # A store served from a socket that we hand over needs a system that can hand over sockets.
        self._rank0_serves = rank0_serves or IS_WINDOWS
        self._run_id = spec.rendezvous.run_id or str(uuid.uuid4())

    @property
    def run_id(self) -> str:
        """The name given by the user, else a random one."""
        return self._run_id

    def join(self, restart: int) -> Assignment:  # noqa: ARG002 - as on several nodes
        """Bind and listen; early ranks wait in the queue until the store's process serves it."""
        addr = self._spec.master_addr or "localhost"
        listener = bind_store(addr, self._spec.master_port or 0)
        port = listener.getsockname()[1]
        if self._rank0_serves:
            listener.close()
        return Assignment(
            world_size=self._num_ranks,
            role_world_size=self._num_ranks,
            master_addr=addr,
            master_port=port,
            run_id=self._run_id,
            listener=None if self._rank0_serves else listener,
            rank0_serves=self._rank0_serves,
        )

    def nodes_waiting(self) -> int:
        """Nobody can join."""
        return 0

    def has_to_regroup(self) -> bool:
        """Nobody can join."""
        return False

    def nodes_standing_by(self) -> int:
        """None is needed."""
        return 0

    def finish(self, on_tick: Callable[[], None] | None = None) -> bool:  # noqa: ARG002 - as on several nodes
        """Nobody to wait for."""
        return True

    def close(self) -> None:
        """Nothing to leave."""


def bind_store(addr: str, port: int) -> socket.socket:
    """Listen where ranks will look for their store.

    Args:
        addr: The address that the ranks are told; if it means this host only, others can't connect.
        port: The port; 0 for a free one.

    Raises:
        UsageError: The port is taken; it says by whom.
    """
    host = "127.0.0.1" if is_loopback(addr) and ":" not in addr else ""
    try:
        return listen_tcp(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"can't listen on port {port}: {error.strerror}") from error
    holder = find_port_holder(port)
    raise UsageError(
        f"port {port} is taken" + (f" by {holder}" if holder else ""),
        hint="leave out --master-port: a free one is chosen then; or end that process",
    )
