"""Join a job: ``init()``."""

from __future__ import annotations

import atexit
import math
import socket
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.environ import environ, get, read_float
from rankwise.base.errors import RendezvousError, UsageError
from rankwise.base.identity import Identity, read_identity, read_int
from rankwise.evidence.recorder import let_threads_settle
from rankwise.evidence.roll import Record, describe_process, find_loopback
from rankwise.runtime.context import RankContext, enter, find_current, leave_all
from rankwise.runtime.control import Control
from rankwise.runtime.device import choose_backend, choose_device, find_device_id, find_kind
from rankwise.runtime.handshake import Meeting, shake_hands
from rankwise.runtime.stores import GROUP_PREFIX, Place, find_place, open_store, place_from_env

if TYPE_CHECKING:
    from types import FrameType

_ARRIVAL_S = 60.0
#: A peer may be a process that has just been started: connecting takes its time even where nothing is wrong.
_CONNECT_S = 60.0
_GRACE_S = 15.0
#: How often this process has met others at a place: each time under a prefix of its own.
_meetings: dict[str, int] = {}
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a call of ``init()`` comes to, arguments and environment taken together."""

    identity: Identity
    place: Place
    device: torch.device | str | None
    backend: str | None
    timeout_s: float | None
    arrival_timeout_s: float
    opened_at: str


def init(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    timeout_s: float | timedelta | None = None,
    arrival_timeout_s: float | None = None,
) -> RankContext:
    """Join the job that this process belongs to; alone, without any variables, it is a world of one.

    Who this process is comes from torchrun's variables (``rankwise run`` sets them too), an srun step, mpirun,
    TF_CONFIG, Kubernetes or SkyPilot, or from the arguments. Where both tell, they must agree. Before anything else is
    sent, all ranks say who they are: absent, doubled and odd ones are named.

    Args:
        backend: As in ``torch.distributed.init_process_group``; None: by the device, ``cpu:gloo,cuda:nccl`` or ``gloo``.
        init_method: ``env://`` (the default), ``tcp://HOST:PORT`` or ``file:///PATH``.
        store: A store to meet at, in place of ``init_method``.
        rank: This process's rank, where no variable tells it.
        world_size: The number of ranks, where no variable tells it.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:3"``; None: the GPU of this local rank, or the CPU where there is none.
        timeout_s: Seconds that a collective may wait for the slowest rank; None: torch's (Gloo 1800, NCCL 600).
            New groups take it over.
        arrival_timeout_s: Seconds from the first rank's arrival to the last one's; None: RANKWISE_ARRIVAL_TIMEOUT, or 60.

    Returns:
        The context. Use it in a ``with`` block, or let the end of the process close it.

    Raises:
        UsageError: Variables and arguments contradict each other or lack something, or the device is not there.
        RendezvousError: The store was not found in time, or the ranks could not connect to each other.
        HandshakeError: Ranks are absent, doubled, or differ in what must be the same; all ranks that came raise it.

    Collective: every rank of the job must call this.
    """
    opened_at = _find_caller(sys._getframe(1))
    _check_not_open()
    identity, place = _identify(rank, world_size, init_method, store)
    request = _Request(
        identity=identity, place=place, device=device, backend=backend, timeout_s=_to_seconds(timeout_s, "timeout_s"),
        arrival_timeout_s=_to_seconds(arrival_timeout_s, "arrival_timeout_s") or read_float("RANKWISE_ARRIVAL_TIMEOUT", _ARRIVAL_S),
        opened_at=opened_at,
    )  # fmt: skip
    return enter(_join(request, store))


def _find_caller(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _check_not_open() -> None:
    context = find_current()
    if context is not None and dist.is_initialized() and dist.group.WORLD is context.group:
        raise UsageError(f"this process has already joined a job, at {context.opened_at}", rank=context.rank,
                         hint="use rankwise.current() for the context, or close it before you join again")  # fmt: skip
    if context is None and dist.is_initialized():
        raise UsageError("this process has already a process group, which rankwise.init() did not make", rank=dist.get_rank(),
                         hint="leave out the other init_process_group (a framework may have called it), or rankwise.init()")  # fmt: skip
    if context is not None:
        context.close()  # the script destroyed the group under it


def _to_seconds(value: object, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"{name}={value!r} is no number of seconds above 0", hint=f"for example {name}=300")
    return float(value)


# ------------------------------------------------------------ who and where


def _identify(
    rank: int | None, world_size: int | None, init_method: str | None, store: dist.Store | None
) -> tuple[Identity, Place]:
    """Bring arguments, address and environment together; contradictions are errors."""
    place = find_place(init_method, store)
    if place is not None:
        rank = _merge("rank", rank, place.rank, "the call", "its init_method")
        world_size = _merge("world_size", world_size, place.world_size, "the call", "its init_method")
    env = environ()
    # Whoever passes both knows better than a cluster's variables: mp.spawn within a step of Slurm. But the names
    # RANK and WORLD_SIZE mean just what the arguments mean.
    given = rank is not None and world_size is not None
    told = read_identity(
        {name: value for name, value in env.items() if name in _TORCH_NAMES} if given else env
    )
    if told is None:
        told = _from_arguments(rank, world_size, env)
    else:
        _merge(told.names[0], rank, told.rank, "the call", "the environment")
        _merge(told.names[1], world_size, told.world_size, "the call", "the environment")
    if place is not None:
        return told, place
    if told.world_size == 1 and (told.master_addr is None or told.master_port is None):
        return told, Place(kind="alone")
    return told, place_from_env(told.master_addr, told.master_port, told.source, told.rank)


_TORCH_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                "TORCHELASTIC_RUN_ID"}  # fmt: skip


def _merge(name: str, ours: int | None, theirs: int | None, here: str, there: str) -> int | None:
    if ours is not None and theirs is not None and ours != theirs:
        raise UsageError(f"{name} is {ours} in {here} and {theirs} in {there}: two worlds that would never meet",
                         hint=f"say it in one place: leave it out of {here}, or unset the variable")  # fmt: skip
    return ours if ours is not None else theirs


def _from_arguments(rank: int | None, world_size: int | None, env: dict[str, str]) -> Identity:
    if rank is None and world_size in {None, 1}:
        rank, world_size = 0, 1
    if rank is None or world_size is None:
        have, lack = ("world_size", "rank") if rank is None else ("rank", "world_size")
        raise UsageError(f"{have}={world_size if rank is None else rank} was given, and neither the call nor the environment tells the {lack}",
                         hint=f"pass {lack} too, or start the script with `rankwise run`")  # fmt: skip
    if rank < 0 or world_size < 1:
        raise UsageError(f"rank={rank}, world_size={world_size}", hint="ranks are 0 to world_size - 1")
    return Identity(
        rank=rank, world_size=world_size, local_rank=read_int(env, "LOCAL_RANK"), master_addr=env.get("MASTER_ADDR"),
        master_port=read_int(env, "MASTER_PORT"), source="the call", names=("rank", "world_size"),
    )  # fmt: skip


# ------------------------------------------------------------------ joining


def _join(request: _Request, given: dist.Store | None) -> RankContext:
    it, place = request.identity, request.place
    if it.local_rank is not None or it.world_size == 1:
        device = choose_device(request.device, it.local_rank or 0, it.rank)
        backend = choose_backend(request.backend, device, it.rank)
    else:
        # The handshake will tell our place on this host; only then is a device picked.
        device, backend = None, choose_backend(request.backend, find_kind(request.device, it.rank), it.rank)
    _check_gloo_interface(backend, it.rank)
    store, meeting = _meet(request, given, _describe(it, backend, device))
    it = _complete(it, meeting)
    if device is None:
        device = choose_device(request.device, it.local_rank or 0, it.rank)
    timeout_s = request.timeout_s or (600.0 if "nccl" in backend else 1800.0)
    group_store = dist.PrefixStore(GROUP_PREFIX, store)
    side = _connect(it, place, backend, device, group_store, timeout_s)
    atexit.register(_leave_at_exit)
    corner = dist.PrefixStore("rankwise/job", store)
    return RankContext(
        rank=it.rank, world_size=it.world_size, local_rank=it.local_rank or 0, local_world_size=it.local_world_size or 1,
        node_rank=it.node_rank or 0, num_nodes=it.num_nodes or 1, device=device, backend=backend, timeout_s=timeout_s,
        group=dist.group.WORLD, control=Control(side, ranks=range(it.world_size), rank=it.rank, store=corner, timeout_s=timeout_s),
        store=corner, source=it.source, opened_at=request.opened_at,
    )  # fmt: skip


def _describe(it: Identity, backend: str, device: torch.device | None) -> Record:
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if "nccl" in backend else ""
    return describe_process(
        rank=it.rank, world_size=it.world_size, local_rank=it.local_rank, backend=backend, nccl=nccl,
        device=None if device is None else find_device_id(device), loopback=find_loopback(get("GLOO_SOCKET_IFNAME")),
    )  # fmt: skip


def _check_gloo_interface(backend: str, rank: int) -> None:
    wanted = get("GLOO_SOCKET_IFNAME")
    if not wanted or "gloo" not in backend or not hasattr(socket, "if_nameindex"):
        return
    names = [name for _, name in socket.if_nameindex()]
    missing = [name for name in wanted.split(",") if name not in names]
    if missing:
        how = (
            "Gloo knows no exclusions (^) and no prefixes, as NCCL does: name one interface"
            if wanted[0] in "^="
            else "name one of these, or unset it"
        )
        raise UsageError(
            f"GLOO_SOCKET_IFNAME={wanted}: this host has no interface {', '.join(missing)}, but {', '.join(names)}",
            rank=rank,
            hint=how,
        )


def _meet(request: _Request, given: dist.Store | None, record: Record) -> tuple[dist.Store, Meeting]:
    """Open the store and shake hands, all within a bound: a store whose host is frozen blocks its clients for ever."""
    it, place, bound_s = request.identity, request.place, request.arrival_timeout_s
    label = f"{place}{id(given) if given is not None else ''}#{place.attempt}"
    generation = _meetings[label] = _meetings.get(label, -1) + 1
    opened: list[dist.Store] = []

    def meet() -> tuple[dist.Store, Meeting]:
        if given is not None:
            raw = given
        elif place.kind == "alone":
            raw = dist.HashStore()
        else:
            raw = open_store(
                place, rank=it.rank, world_size=it.world_size, timeout_s=bound_s, clock=SYSTEM_CLOCK
            )
        opened.append(raw)
        # A given store has no time-out of ours yet, and torch's is 5 minutes.
        store = dist.PrefixStore(f"{place.attempt}.{generation}", raw)
        if get("RANKWISE_HANDSHAKE") in {"0", "off"} or place.kind == "alone":
            return store, Meeting(ranks_by_node=[[rank] for rank in range(it.world_size)] if place.kind == "alone" else None,
                                  num_nodes=it.num_nodes or 1, clock_skew_s=None, doubts=())  # fmt: skip
        meeting = shake_hands(dist.PrefixStore("rankwise/meet", store), record, timeout_s=bound_s,
                              strict=get("RANKWISE_HANDSHAKE") != "lenient", clock=SYSTEM_CLOCK, notice=_say)  # fmt: skip
        return store, meeting

    try:
        store, meeting = call_within(2 * bound_s + _GRACE_S, meet)
    except OverdueError:
        doing = "answered the connection and then nothing" if opened else "was reached and did not answer"
        raise RendezvousError(f"the store at {place} {doing}", rank=it.rank,
                              hint="the process that serves it (rank 0, or the launcher) is stopped, or its host is: look there first") from None  # fmt: skip
    except dist.DistError as error:
        raise RendezvousError(f"the store at {place} failed: {str(error).splitlines()[0]}", rank=it.rank,
                              hint="the process that serves it (rank 0, or the launcher) has probably ended: look at its output") from error  # fmt: skip
    _report(meeting, it)
    return store, meeting


def _report(meeting: Meeting, it: Identity) -> None:
    if it.rank == 0:
        for doubt in meeting.doubts:
            _say(f"warning: {doubt}")
    if meeting.clock_skew_s is not None and not it.local_rank:
        _say(
            f"warning: [rank {it.rank}] the clock of {socket.gethostname()} is {meeting.clock_skew_s:+.0f} s off another host's of this job"
        )


def _complete(it: Identity, meeting: Meeting) -> Identity:
    """Fill in what the variables did not tell."""
    it = replace(it, num_nodes=it.num_nodes or meeting.num_nodes)
    if meeting.ranks_by_node is None:
        return it
    node = next(number for number, ranks in enumerate(meeting.ranks_by_node) if it.rank in ranks)
    here = meeting.ranks_by_node[node]
    return replace(
        it,
        local_rank=here.index(it.rank) if it.local_rank is None else it.local_rank,
        local_world_size=it.local_world_size or len(here),
        node_rank=node if it.node_rank is None else it.node_rank,
    )


def _connect(
    it: Identity, place: Place, backend: str, device: torch.device, store: dist.Store, timeout_s: float
) -> dist.ProcessGroup | None:
    """Make the process groups: the one of all ranks, and the side channel's; Gloo's own connecting has no bound."""
    timeout = timedelta(seconds=timeout_s)
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}

    def connect() -> dist.ProcessGroup | None:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # the current device is a thread's own
        dist.init_process_group(
            backend, store=store, rank=it.rank, world_size=it.world_size, timeout=timeout, **options
        )
        return dist.new_group(backend="gloo", timeout=timeout) if it.world_size > 1 else None

    bound_s = min(timeout_s, _CONNECT_S) + _GRACE_S
    try:
        return call_within(bound_s, connect)
    except OverdueError:
        problem = f"did not all connect within {round(bound_s, 1):g} s"
    except RuntimeError as error:
        if (
            not isinstance(error, dist.DistError)
            and "gloo" not in str(error).lower()
            and "connect" not in str(error).lower()
        ):
            raise
        problem = f"could not all connect: {str(error).splitlines()[0]}"
    raise RendezvousError(f"all {it.world_size} ranks are at the store ({place}), but {problem}", rank=it.rank,
                          hint="a rank ended in between, a firewall keeps the ranks' own ports shut, or they listen on the wrong interface: "
                          "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the one that the hosts share")  # fmt: skip


def _leave_at_exit() -> None:
    leave_all()
    let_threads_settle()


def _say(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        sys.stderr.write(f"rankwise: {text}\n")
