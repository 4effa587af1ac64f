"""Where whoever serves takes in those that come: servers of parameters, and the coordinator.

A door is a listening socket whose address stands in the job's store. Whoever serves may die and come back: then another door stands
there, and nobody answers at the old one. Whoever comes shows the secret of that door, which only ranks of the job can read.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import get
from rankwise.base.errors import RendezvousError
from rankwise.base.osdoor import IS_LINUX
from rankwise.parallel.servers.link import Link

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

_SECRET_BYTES = 16
#: Whoever has connected shows the secret at once.
_SHOW_S, _CONNECT_S, _POLL_S = 2.0, 5.0, 0.01
_CLOSED = "closed"


class ClosedError(RendezvousError):
    """Whoever served has ended, and will not come back."""


@contextmanager
def naming_store(rank: int | None = None) -> Iterator[None]:
    """Raise a RendezvousError where the job's store does not answer; for calls of the store alone."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise RendezvousError(
            f"the job's store failed: {str(error).splitlines()[0]}", rank=rank,
            hint="the process that serves it (the launcher, or rank 0) has probably ended: look at its output",
        ) from error  # fmt: skip


@final
class Door:
    """The side that takes in.

    Args:
        store: The servers' corner of the store.
        name: Whose door it is.
        rank: Our rank, for errors.
        host: The address under which others reach us; empty if all of them are on this host.
    """

    def __init__(self, store: dist.Store, name: str, *, rank: int, host: str) -> None:
        self._store, self._key, self._rank = store, f"door/{name}", rank
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        if not host and IS_LINUX:
            # Of the abstract kind: it has no file, and is gone with the process.
            self._address = [f"\0rankwise-{secrets.token_hex(_SECRET_BYTES)}"]
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._address[0])
            self._listener.listen(socket.SOMAXCONN)
        else:
            host = host or "127.0.0.1"
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
            self._address = [host, str(self._listener.getsockname()[1])]

    def open(self) -> None:
        """Say where the door is; whoever comes before ``accept`` is called waits for it."""
        self._store.set(self._key, json.dumps([self._address, self._secret.hex()]))

    def accept(self, timeout_s: float) -> Link | None:
        """Return a link to the next one that comes; None if nobody does in time, or a stranger."""
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        connection.settimeout(_SHOW_S)
        with suppress(OSError):
            shown = connection.recv(_SECRET_BYTES)
            if secrets.compare_digest(shown, self._secret):
                return Link(connection, peer="a worker that joins", rank=self._rank)
        connection.close()
        return None

    def close(self) -> None:
        """Take in nobody any more: whoever comes hears that we have ended."""
        with suppress(RuntimeError):
            self._store.set(self._key, _CLOSED)
        self._listener.close()


def shut(store: dist.Store, name: str) -> None:
    """Close the door of one that has died and will not come back."""
    store.set(f"door/{name}", _CLOSED)


def knock(store: dist.Store, name: str, *, peer: str, rank: int, timeout_s: float) -> Link:
    """Connect to whoever serves under a name; if it has died, to its successor.

    Args:
        store: The servers' corner of the store.
        name: Whose door.
        peer: Who that is, for errors.
        rank: Our rank, for errors.
        timeout_s: Seconds to wait for it.

    Raises:
        ClosedError: It has ended, and will not come back.
        RendezvousError: It did not come, or can't be reached.
    """
    key, end = f"door/{name}", SYSTEM_CLOCK.monotonic() + timeout_s
    told = "it has not opened its door"
    while True:
        with naming_store(rank):
            text = store.get(key).decode() if store.check([key]) else ""
        if text:
            if text == _CLOSED:
                raise ClosedError(f"no link to {peer}: it has ended", rank=rank, hint="look at its output")
            address, secret = json.loads(text)
            try:
                connection = _connect(address)
                connection.sendall(bytes.fromhex(secret))
                return Link(connection, peer=peer, rank=rank, tells=True)
            except OSError as error:
                told = f"{':'.join(address).strip(chr(0))}: {error.strerror or error}"
        if SYSTEM_CLOCK.monotonic() > end:
            raise RendezvousError(
                f"no link to {peer} within {timeout_s:g} s: {told}", rank=rank,
                hint="look at its output; or a firewall keeps the ranks' own ports shut",
            )  # fmt: skip
        SYSTEM_CLOCK.sleep(_POLL_S)


def _connect(address: list[str]) -> socket.socket:
    if len(address) > 1:
        return socket.create_connection((address[0], int(address[1])), timeout=_CONNECT_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(address[0])
    except OSError:
        connection.close()
        raise
    return connection


def find_host(num_nodes: int) -> str:
    """Return the address of this host that others of the job reach, the one by which this host reaches the store; empty if there is no other."""
    if num_nodes == 1:
        return ""
    place = get("MASTER_ADDR") or socket.gethostname()
    family, kind, _, _, address = socket.getaddrinfo(place, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: only asks for the route
        found = str(probe.getsockname()[0])
    if not found.startswith("127."):
        return found
    # The store is on this host: then by our own name.
    with suppress(OSError):
        return str(socket.gethostbyname(os.uname().nodename))
    return found
