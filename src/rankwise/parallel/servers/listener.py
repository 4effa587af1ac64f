"""Listening sockets of servers and of the coordinator, published in the job's store, and how workers connect to them.

A process that is started again publishes a new address under the same key; nobody answers at the old one.

Both ends prove, before either reads a message of the other, that they know the job's secret, this listener's nonce, which is in the
store, and its address. ``rankwise run --role-counts`` gives the ranks of all nodes a secret (RANKWISE_JOB_SECRET); elsewhere the user may. Without it,
whoever reads the job's store can connect to a server, and whoever writes it can pose as one. What follows is neither encrypted nor signed. On
one host both ends must also be of the same user, as the kernel reports it.
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
from collections import deque
from contextlib import suppress
from typing import Any, final

import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.environ import JOB_SECRET, get
from rankwise.base.errors import RendezvousError
from rankwise.base.os_calls import IS_LINUX, find_address
from rankwise.engine.node_addresses import find_address_towards, look_up
from rankwise.parallel.servers.link import Link, LinkLostError, close_in_children

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_CONNECT_S, _POLL_S, _NUM_REFUSALS = 5.0, 0.01, 5
#: So long a process that is started again is waited for: it has to import torch, perhaps beside many others.
RETURN_S = 120.0
#: A store at one of these addresses is reached from this host alone.
_LOCAL = {"", "localhost", "127.0.0.1", "::1"}
#: An address of no host (RFC 5737): the route to it is the default route.
_OUTSIDE = "192.0.2.1"
_CLOSED = "closed"
_SECRET_HINT = "RANKWISE_JOB_SECRET, where it is set, must be the same on all nodes"


class ClosedError(RendezvousError):
    """The peer has ended, and is not started again."""


@final
class JobStore:
    """The job's store, whose calls raise a RendezvousError where it does not answer."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.underlying_store, self._rank = store, rank

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.underlying_store, name)

        def ask(*args: Any) -> Any:
            try:
                return call(*args)
            except dist.DistError as error:
                raise RendezvousError(
                    f"the job's store failed: {str(error).splitlines()[0]}", rank=self._rank,
                    hint="the process that serves it (the launcher, or rank 0) has probably ended: look at its output",
                ) from error  # fmt: skip

        return ask


@final
class Listener:
    """A listening socket, published in the store under a name: a server's number, or "coordinator"; without a host it is reached from this one alone."""

    def __init__(self, store: dist.Store, name: str, *, rank: int, host: str) -> None:
        self._store, self._key, self._rank = store, f"listener/{name}", rank
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        if not host and IS_LINUX:
            # Of the abstract kind: it has no file, and is gone with the process.
            self._address = [f"\0rankwise-{secrets.token_hex(_NONCE_BYTES)}"]
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(self._address[0])
            self._socket.listen(socket.SOMAXCONN)
        else:
            host = host or "127.0.0.1"
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
            self._address = [host, str(self._socket.getsockname()[1])]

        close_in_children(self._socket)

    def open(self) -> None:
        """Publish the address; a connection that is made before ``accept`` is called waits in the backlog."""
        self._store.set(self._key, json.dumps([self._address, self._nonce.hex()]))

    def accept(self, timeout_s: float) -> Link | None:
        """Return a link to the next peer; None if nobody connects in time.

        It is authenticated when its first message is received.
        """
        try:
            self._socket.settimeout(timeout_s)
            connection, _ = self._socket.accept()
        except OSError:  # nobody came, or it was closed meanwhile
            return None
        if not _is_own_user(connection):
            connection.close()
            return None
        return Link(connection, peer="a process that connects", rank=self._rank, opening=self._authenticate)

    def _authenticate(self, link: Link, timeout_s: float) -> None:
        def answer(shown: bytes) -> bytes:
            nonce, proof = shown[:_NONCE_BYTES], shown[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _make_proof("worker", self._address, self._nonce, nonce)):
                raise LinkLostError(
                    "a process that connects does not know the job's secret",
                    rank=self._rank,
                    hint=_SECRET_HINT,
                )
            return _make_proof("server", self._address, self._nonce, nonce)

        link.exchange(_NONCE_BYTES + _PROOF_BYTES, timeout_s, answer)

    def close(self, *, restarts: bool = False) -> None:
        """Stop listening.

        Peers that connect later learn that we have ended, or wait for the process that is started in our place.
        """
        with suppress(RuntimeError, RendezvousError):
            if not restarts:
                self._store.set(self._key, _CLOSED)
        self._socket.close()


def connect(store: dist.Store, name: str, *, peer: str, rank: int, timeout_s: float, may_return: bool = True) -> Link:
    """Connect to the process that listens under a name; if it has died, to the one that is started in its place.

    Where none is, ``may_return`` is False, and a published address that refuses is an error at once.

    Raises:
        ClosedError: It has ended, and is not started again.
        RendezvousError: It does not listen in time, or can't be reached.
    """
    key, end = f"listener/{name}", SYSTEM_CLOCK.monotonic() + timeout_s
    reason, refused = "it does not listen yet", deque[str](maxlen=_NUM_REFUSALS)
    while True:
        text = store.get(key).decode() if store.check([key]) else ""
        if text:
            if text == _CLOSED:
                raise ClosedError(f"no link to {peer}: it has ended", rank=rank, hint="look at its output")
            address, nonce = json.loads(text)
            try:
                return _connect(address, bytes.fromhex(nonce), peer=peer, rank=rank)
            except OSError as error:
                reason = f"{':'.join(address).strip(chr(0))}: {error.strerror or error}"
                # It listens before it publishes, so it has died; or ended, and the store is about to say so.
                refused.append(text if isinstance(error, ConnectionRefusedError) else "")
            if not may_return and refused.count(text) == _NUM_REFUSALS:
                raise RendezvousError(
                    f"no link to {peer}: it has died ({reason})", rank=rank, hint="look at its output"
                )
        if SYSTEM_CLOCK.monotonic() > end:
            raise RendezvousError(
                f"no link to {peer} within {timeout_s:g} s: {reason}", rank=rank,
                hint="look at its output; or a firewall blocks the ranks' own ports",
            )  # fmt: skip
        SYSTEM_CLOCK.sleep(_POLL_S)


def _connect(address: list[str], nonce: bytes, *, peer: str, rank: int) -> Link:
    """Connect to an address; the peer is authenticated when its first message is received."""
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
        own_nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own_nonce + _make_proof("worker", address, nonce, own_nonce))
    except OSError:
        connection.close()
        raise
    expected = _make_proof("server", address, nonce, own_nonce)

    def check(link: Link, timeout_s: float) -> None:
        if not hmac.compare_digest(link.exchange(_PROOF_BYTES, timeout_s), expected):
            link.close()
            raise LinkLostError(
                f"the process that answers as {peer} does not know the job's secret",
                rank=rank,
                hint=_SECRET_HINT,
            )

    return Link(connection, peer=peer, rank=rank, reports_waits=True, opening=check)


def _make_proof(side: str, address: list[str], listener_nonce: bytes, worker_nonce: bytes) -> bytes:
    """Return an HMAC that only those can make that know the job's secret; it is not valid for another listener, nor from the other side."""
    text = json.dumps([side, address, listener_nonce.hex(), worker_nonce.hex()]).encode()
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
    reason, address = "", ""
    for place in places:
        # Any port: it is only asked which way the host takes.
        found = find_address_towards(look_up(place or "127.0.0.1", "9"))
        if found is None:
            reason = f"it has no route to {place}, or does not know the name"
            continue
        address = found
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
        reason = f"{place} is {address} here"
    if address and num_nodes == 1:
        return address
    raise RendezvousError(
        f"this host has no address under which others reach it: {reason}",
        hint="name the interface of their network: GLOO_SOCKET_IFNAME=eth0, say; or give hosts their addresses in /etc/hosts",
    )


def _find_store_host(store: dist.Store | None) -> str:
    while store is not None:
        if isinstance(host := getattr(store, "host", ""), str) and host:
            return host
        store = getattr(store, "underlying_store", None)
    return get("MASTER_ADDR")
