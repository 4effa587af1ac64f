"""Where whoever serves takes in those that come: servers of parameters, and the coordinator.

A door is a listening socket whose address stands in the job's store. Whoever serves may die and come back: then another door stands
there, and nobody answers at the old one.

Both sides prove, before either reads a message of the other, that they know the job's secret, this door's nonce, which stands in the
store, and its address. ``rankwise run --role-counts`` gives the ranks of one node a secret (RANKWISE_JOB_SECRET); elsewhere the user may. Without it,
whoever reads the job's store can come in; whoever writes it, to the workers. What follows is neither encrypted nor signed. On one host
both ends are also of the same user, by the kernel's word.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, final

import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import JOB_SECRET, get
from rankwise.base.errors import RendezvousError
from rankwise.base.osdoor import IS_LINUX, find_address
from rankwise.parallel.servers.link import Link, LinkLostError, close_in_children

if TYPE_CHECKING:
    from collections.abc import Iterator

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_CONNECT_S, _POLL_S = 5.0, 0.01
#: Whose store stands under these is reached from here alone.
_LOCAL = {"", "localhost", "127.0.0.1", "::1"}
#: Of no host (RFC 5737): where the way to it begins, there is the way out.
_OUTSIDE = "192.0.2.1"
_CLOSED = "closed"


class ClosedError(RendezvousError):
    """Whoever served has ended, and will not come back."""


@contextmanager
def naming_store(rank: int | None = None) -> Iterator[None]:
    """Raise a RendezvousError where the job's store does not answer; for calls of the store alone."""
    try:
        yield
    except dist.DistError as error:
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
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        if not host and IS_LINUX:
            # Of the abstract kind: it has no file, and is gone with the process.
            self._address = [f"\0rankwise-{secrets.token_hex(_NONCE_BYTES)}"]
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._address[0])
            self._listener.listen(socket.SOMAXCONN)
        else:
            host = host or "127.0.0.1"
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
            self._address = [host, str(self._listener.getsockname()[1])]

        close_in_children(self._listener)

    def open(self) -> None:
        """Say where the door is; whoever comes before ``accept`` is called waits for it."""
        self._store.set(self._key, json.dumps([self._address, self._nonce.hex()]))

    def accept(self, timeout_s: float) -> Link | None:
        """Return a link to the next one that comes; None if nobody does in time. Whether it is of the job turns out at its first message."""
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        if not _is_own_user(connection):
            connection.close()
            return None
        return Link(connection, peer="a worker that joins", rank=self._rank, opening=self._let_in)

    def _let_in(self, link: Link, timeout_s: float) -> None:
        def answer(shown: bytes) -> bytes:
            nonce, proof = shown[:_NONCE_BYTES], shown[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _prove("worker", self._address, self._nonce, nonce)):
                raise LinkLostError("whoever joins does not know the job's secret", rank=self._rank)
            return _prove("server", self._address, self._nonce, nonce)

        link.exchange(_NONCE_BYTES + _PROOF_BYTES, timeout_s, answer)

    def close(self, *, comes_back: bool = False) -> None:
        """Take in nobody any more: whoever comes hears that we have ended, or waits for the process that comes in our place."""
        with suppress(RuntimeError):
            if not comes_back:
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
            address, nonce = json.loads(text)
            try:
                return _connect(address, bytes.fromhex(nonce), peer=peer, rank=rank)
            except OSError as error:
                told = f"{':'.join(address).strip(chr(0))}: {error.strerror or error}"
        if SYSTEM_CLOCK.monotonic() > end:
            raise RendezvousError(
                f"no link to {peer} within {timeout_s:g} s: {told}", rank=rank,
                hint="look at its output; or a firewall keeps the ranks' own ports shut",
            )  # fmt: skip
        SYSTEM_CLOCK.sleep(_POLL_S)


def _connect(address: list[str], door: bytes, *, peer: str, rank: int) -> Link:
    """Connect to a door; that it is one of the job's turns out when its first message is received.

    Raises:
        OSError: Nobody answers there, or another user.
    """
    if len(address) > 1:
        connection = socket.create_connection((address[0], int(address[1])), timeout=_CONNECT_S)
    else:
        connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CONNECT_S)
        if len(address) == 1:
            connection.connect(address[0])
        if not _is_own_user(connection):
            raise PermissionError(errno.EPERM, "another user listens there")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce + _prove("worker", address, door, nonce))
    except OSError:
        connection.close()
        raise
    expected = _prove("server", address, door, nonce)

    def check(link: Link, timeout_s: float) -> None:
        if not hmac.compare_digest(link.exchange(_PROOF_BYTES, timeout_s), expected):
            link.close()
            raise LinkLostError(f"whoever answers for {peer} does not know the job's secret", rank=rank)

    return Link(connection, peer=peer, rank=rank, tells=True, opening=check)


def _prove(side: str, address: list[str], door: bytes, nonce: bytes) -> bytes:
    """Return what only those can make that know the job's secret; it is worth nothing at another door, or from the other side."""
    text = json.dumps([side, address, door.hex(), nonce.hex()]).encode()
    return hmac.digest(get(JOB_SECRET).encode(), text, "sha256")


def _is_own_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of our user, as far as the kernel says."""
    if connection.family != getattr(socket, "AF_UNIX", None) or not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def find_host(store: dist.Store, num_nodes: int) -> str:
    """Return the address of this host that others of the job reach.

    It is that of the interface that GLOO_SOCKET_IFNAME names; else that by which this host reaches the store.

    Args:
        store: The job's.
        num_nodes: How many hosts the job is known to have.

    Raises:
        RendezvousError: There is none, or it is loopback's, and the job has several hosts.
    """
    if address := find_address(get("GLOO_SOCKET_IFNAME").partition(",")[0]):
        return address
    server = _find_store_host(store)
    places = [server] if server not in _LOCAL or num_nodes == 1 else []
    # Where the store is on this host, its name may stand for loopback.
    if server not in _LOCAL or num_nodes > 1:
        places += [socket.gethostname(), _OUTSIDE]
    told, address = f"it has no way to {server or 'others'}", ""
    for place in places:
        try:
            address = _find_way(place or "127.0.0.1")
        except OSError as error:
            told = f"{place}: {error.strerror or error}"
            continue
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
        told = f"{place} is {address} here"
    if address and num_nodes == 1:
        return address
    raise RendezvousError(
        f"this host has no address under which others reach it: {told}",
        hint="name the interface of their network: GLOO_SOCKET_IFNAME=eth0, say; or give hosts their addresses in /etc/hosts",
    )


def _find_store_host(store: dist.Store | None) -> str:
    while store is not None:
        if host := getattr(store, "host", ""):
            return str(host)
        store = getattr(store, "underlying_store", None)
    return get("MASTER_ADDR")


def _find_way(place: str) -> str:
    """Return our own address on the way to a host.

    Raises:
        OSError: It is unknown, or there is no way.
    """
    family, kind, _, _, address = socket.getaddrinfo(place, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: only asks for the route
        return str(probe.getsockname()[0])
