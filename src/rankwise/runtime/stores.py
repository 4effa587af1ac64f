"""Open the store at which the ranks of a job meet, with a bound, and with errors that say what is in the way."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs, urlparse
from urllib.request import url2pathname

import torch.distributed as dist

from rankwise.base.deadline import call_within
from rankwise.base.environ import get, is_on
from rankwise.base.errors import RendezvousError, UsageError
from rankwise.base.host import find_port_holder

if TYPE_CHECKING:
    from collections.abc import Callable
    from urllib.parse import ParseResult

    from rankwise.base.clock import Clock

#: Where torch keeps the addresses of the peers: a store that has them has seen a job begin.
GROUP_PREFIX = "rankwise/group"
#: Where the registry of a rendezvous is; once there is a verdict, nobody else may join it.
RENDEZVOUS_PREFIX = "rankwise/meet"
_POLL_S = 0.05
_CONNECT_S = 3.0
_ANSWER_S = 15.0
_NOTICE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where ranks meet.

    Attributes:
        kind: A TCP store, a file, a store that the caller has, nowhere (a world of one), or where the environment says.
        host: Of the TCP store, and ``port``.
        path: Of the file.
        is_served: Whether somebody serves the TCP store already (torchrun's agent, rankwise's store process).
        rank: What the address itself says, as in ``tcp://host:port?rank=0&world_size=2``; and ``world_size``.
        attempt: Which attempt of the job this is: one store may see several.
    """

    kind: Literal["tcp", "file", "given", "alone", "env"]
    host: str = ""
    port: int = 0
    path: str = ""
    is_served: bool = False
    rank: int | None = None
    world_size: int | None = None
    attempt: str = "0"

    def __str__(self) -> str:
        shown = {
            "given": "the given store",
            "alone": "nowhere",
            "env": "env://",
            "file": f"file://{self.path}",
        }
        return shown.get(self.kind, f"{self.host}:{self.port}")


def find_place(init_method: str | None, store: dist.Store | None) -> Place | None:
    """Return where to meet, as the caller says it; None if the environment has to tell.

    Args:
        init_method: ``env://``, ``tcp://host:port``, ``file:///path`` or None.
        store: A store of the caller's.

    Raises:
        UsageError: The address can't be understood.
    """
    if store is not None:
        if init_method is not None:
            raise UsageError(
                f"a store and init_method={init_method!r} were given",
                hint="pass one of them: each is a rendezvous",
            )
        return Place(kind="given")
    if init_method is None:
        return None
    url = urlparse(init_method)
    query: dict[str, Any] = {
        name: _to_int(name, values[-1])
        for name, values in parse_qs(url.query).items()
        if name in {"rank", "world_size"}
    }
    if url.scheme == "env":
        return Place(kind="env", **query)
    if url.scheme == "tcp":
        return _find_tcp(init_method, url, query)
    if url.scheme == "file":
        return _find_file(init_method, url, query)
    raise UsageError(
        f"init_method={init_method!r}: this is not a rendezvous",
        hint="env://, tcp://HOST:PORT or file:///PATH",
    )


def _find_file(init_method: str, url: ParseResult, query: dict[str, Any]) -> Place:
    if url.netloc and os.name != "nt":
        raise UsageError(
            f"init_method={init_method!r} names the host {url.netloc!r} and the path {url.path!r}",
            hint=f"write file:///{url.netloc}{url.path}, with three slashes",
        )
    if not url.path.strip("/"):
        raise UsageError(f"init_method={init_method!r} has no path", hint="write file:///folder/file")
    path = url2pathname(url.netloc + url.path) if os.name == "nt" else url.path
    return Place(kind="file", path=path, **query)


def _find_tcp(init_method: str, url: ParseResult, query: dict[str, Any]) -> Place:
    try:
        host, port = url.hostname, url.port
    except ValueError as error:
        raise UsageError(f"init_method={init_method!r}: {error}", hint="write tcp://HOST:PORT") from error
    if not host or not port:
        raise UsageError(f"init_method={init_method!r} lacks host or port", hint="write tcp://HOST:PORT")
    return Place(kind="tcp", host=host, port=port, **query)


def _to_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"init_method says {name}={text!r}", hint=f"{name} is a whole number") from None


def place_from_env(host: str | None, port: int | None, source: str, rank: int) -> Place:
    """Return the TCP store that the environment tells of.

    Args:
        host: Its host, or None.
        port: Its port, or None.
        source: Where rank and world size come from.
        rank: Our rank, for errors.

    Raises:
        UsageError: Host or port is missing.
    """
    host = (host or "").strip() or None
    if host is None or port is None:
        missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if value is None]
        verb = "are" if len(missing) > 1 else "is"
        raise UsageError(f"rank and world size are set ({source}), but {' and '.join(missing)} {verb} not set", rank=rank,
                         hint="set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, the same on all ranks; "
                         "with mpirun: -x MASTER_ADDR -x MASTER_PORT")  # fmt: skip
    if not 0 < port < 65536:
        raise UsageError(
            f"MASTER_PORT={port} is not a TCP port",
            rank=rank,
            hint="use a free port from 1024 to 65535, the same on all ranks",
        )
    is_served = get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(kind="tcp", host=host, port=port, is_served=is_served, attempt=get("TORCHELASTIC_RESTART_COUNT", "0"))


def open_store(
    place: Place, *, rank: int, world_size: int, timeout_s: float, clock: Clock, notice: Callable[[str], None]
) -> dist.Store:
    """Open a store; rank 0 serves it, unless somebody does already.

    Args:
        place: Where.
        rank: Our rank.
        world_size: How many ranks.
        timeout_s: Seconds to wait for whoever serves it.
        clock: Where time comes from.
        notice: Told for whom we wait when that takes long.

    Raises:
        RendezvousError: Nobody serves it, its port is taken, its host has no address, or a file is left of another run.
    """
    if place.kind == "file":
        return _open_file(place, rank, world_size)
    addresses = _resolve(place, rank)
    options = {} if is_on("USE_LIBUV", default=os.name != "nt") else {"use_libuv": False}
    timeout = timedelta(seconds=timeout_s)
    make = partial(dist.TCPStore, place.host, place.port, None, timeout=timeout, **options)
    if rank != 0 or place.is_served:
        _wait_listening(place, addresses, rank, timeout_s, clock, notice)
        # It listens, and may yet be stopped: then the constructor, and all of its calls, would block for ever.
        return call_within(min(timeout_s, _ANSWER_S), lambda: make(is_master=False))
    try:
        return make(is_master=True, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and "ddress already in use" not in str(error):
            raise RendezvousError(
                f"rank 0 can't serve the store at {place}: {_first_line(error)}",
                rank=rank,
                hint=f"{place.host} must be a name or address of the host that rank 0 runs on",
            ) from error
        holder = find_port_holder(place.port) or "another process"
        raise RendezvousError(
            f"rank 0 can't serve the store at {place}: the port is taken by {holder}",
            rank=rank,
            hint="use another MASTER_PORT, or end that process; if it is of this job, two processes claim rank 0",
        ) from error


def _resolve(place: Place, rank: int) -> str:
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(
            f"the host name {place.host!r} of the store has no address here: {error.strerror or error}",
            rank=rank,
            hint="set MASTER_ADDR to a name or address of rank 0's host that every host can look up (`getent hosts NAME`)",
        ) from error
    return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))


def _wait_listening(
    place: Place, addresses: str, rank: int, timeout_s: float, clock: Clock, notice: Callable[[str], None]
) -> None:
    """Wait until somebody listens: torch would wait too, but in the end not say for what."""
    end, is_reported = clock.monotonic() + timeout_s, False
    who = "the launcher's store" if place.is_served else "rank 0"
    shown = f"{place} ({addresses})" if addresses != place.host else str(place)
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=_CONNECT_S).close()
        except OSError as error:
            reason = str(error.strerror or error)
        else:
            return
        left_s = end - clock.monotonic()
        if left_s <= 0:
            break
        if not is_reported and timeout_s - left_s > _NOTICE_S:
            is_reported = True
            notice(f"[rank {rank}] waiting for {who} at {shown}: {reason}; for {left_s:.0f} s more")
        clock.sleep(_POLL_S)
    raise RendezvousError(f"{who} was not found at {shown} within {round(timeout_s, 1):g} s: {reason}", rank=rank,
                          hint=f"check whether {who} runs, and whether MASTER_ADDR and MASTER_PORT are the same on all ranks; between hosts, "
                          "whether a firewall lets the port through")  # fmt: skip


def _open_file(place: Place, rank: int, world_size: int) -> dist.Store:
    path = Path(place.path)
    try:
        left = path.read_bytes()
    except FileNotFoundError:
        left = b""
    except OSError as error:
        raise RendezvousError(
            f"{place} can't be read: {error.strerror}",
            rank=rank,
            hint="all ranks need read and write access to it",
        ) from error
    # Written by torch after the handshake: whoever finds it has reached a rendezvous that is over.
    traces = (b"default_pg", GROUP_PREFIX.encode(), RENDEZVOUS_PREFIX.encode() + b"/verdict")
    if any(trace in left for trace in traces):
        raise RendezvousError(
            f"{place} holds the traces of another run ({len(left)} bytes)",
            rank=rank,
            hint=f"if that run is over: rm {place.path}; better use a new file for each run, or env://",
        )
    if not path.parent.is_dir():
        raise RendezvousError(
            f"{place}: there is no folder {path.parent}",
            rank=rank,
            hint="create it, on a file system that all ranks share",
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RendezvousError(f"{place} can't be written", rank=rank, hint="all ranks need read and write access to it")
    return dist.FileStore(place.path, world_size)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
