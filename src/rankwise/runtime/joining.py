"""Join a job: ``init()``; and lay its ranks out as a mesh, by degrees or as a mesh of torch's has them."""

from __future__ import annotations

import atexit
import logging
import socket
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.deadline import OverdueError, call_within, prepare_exit
from rankwise.base.environ import get, read_float
from rankwise.base.errors import RankwiseError, RendezvousError, UsageError
from rankwise.base.log import get_logger
from rankwise.base.roles import COUNTS, list_roles, note_apart, read_counts
from rankwise.evidence.in_rank.rank_exit import let_threads_settle
from rankwise.evidence.in_rank.rendezvous_registry import Record, describe_process, find_loopback
from rankwise.runtime.connecting import connect
from rankwise.runtime.context import RankContext, enter, find_current, leave_all
from rankwise.runtime.control import Control
from rankwise.runtime.device import choose_backend, choose_device, find_device_id, find_kind
from rankwise.runtime.groups import read_seconds
from rankwise.runtime.handshake import HandshakeResult, shake_hands
from rankwise.runtime.mesh import AXES, Mesh, read_degrees, rename_axes, show_degrees
from rankwise.runtime.offline_evidence import leave_evidence
from rankwise.runtime.rank_identity import identify
from rankwise.runtime.stores import GROUP_PREFIX, RENDEZVOUS_PREFIX, Place, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from rankwise.base.identity import Identity

_LOGGER = get_logger(__name__)

_ARRIVAL_S = 60.0
_GRACE_S = 15.0
_rendezvous_seen: dict[str, int] = {}
_given: WeakKeyDictionary[dist.Store, int] = WeakKeyDictionary()
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
    role: str | None


def init(  # noqa: PLR0913 - most calls give none
    backend: str | None = None,
    *,
    init_method: str | None = None,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    timeout_s: float | timedelta | None = None,
    arrival_timeout_s: float | None = None,
    mesh: Mapping[str, int] | DeviceMesh | None = None,
    role: str | None = None,
) -> RankContext:
    """Join the job that this process belongs to; without any variables it is a world of one.

    The rank comes from torchrun's variables (``rankwise run`` sets them too), an srun step, mpirun,
    TF_CONFIG, Kubernetes or SkyPilot, or from the arguments. Where both are set, they must agree. Before anything else
    is sent, all ranks publish who they are: absent, duplicate and mismatched ones are named.

    Args:
        backend: As in ``torch.distributed.init_process_group``; None: by the device, ``cpu:gloo,cuda:nccl`` or
            ``gloo``.
        init_method: ``env://`` (the default), ``tcp://HOST:PORT`` or ``file:///PATH``.
        store: A store for the rendezvous, instead of ``init_method``.
        rank: This process's rank, where no variable sets it.
        world_size: The number of ranks, where no variable sets it.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:3"``; None: the GPU of this local rank, or the CPU where there is none.
        timeout_s: Seconds that a collective may wait for the slowest rank; None: 600 with NCCL, 1800 without, as in
            torch. Groups of ``rankwise.new_group`` inherit it (those of ``torch.distributed.new_group`` have torch's
            default).
        arrival_timeout_s: Seconds from the first rank's arrival to the last one's; None: RANKWISE_ARRIVAL_TIMEOUT, or
            60.
        mesh: Lay the ranks out as a grid, ``{"replicate": 2, "shard": -1}``; see ``ctx.mesh``. None: no grid.
        role: This rank's role in a job of servers and workers, ``"ps"``, ``"chief"`` or ``"worker"``, the ``"ps"``
            being the first ranks; None: as ``rankwise run --role-counts ps=2,worker=6`` says, or TF_CONFIG with tasks
            ``ps``. Ranks with roles don't wait for each other here, and there is no process group of all of them: any
            of them may die and be restarted.

    Returns:
        The context. Use it in a ``with`` block, or let the end of the process close it.

    Raises:
        UsageError: Variables and arguments contradict each other or are incomplete, or there is no such device.
        RendezvousError: The store was not found in time, or the ranks could not connect to each other.
        HandshakeError: Ranks are absent, duplicate, or differ in what must be the same; all ranks that arrived raise
            it.

    Collective: every rank of the job must call this; with roles, none waits for another.
    """
    caller = sys._getframe(1)
    opened_at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    try:
        _check_not_open()
        identity, place = identify(rank, world_size, init_method, store)
        arrival_s = _to_seconds(arrival_timeout_s, "arrival_timeout_s")
        leave_evidence(identity)
        request = _Request(
            identity=identity,
            place=place,
            device=device,
            backend=backend,
            timeout_s=_to_seconds(timeout_s, "timeout_s"),
            arrival_timeout_s=arrival_s or read_float("RANKWISE_ARRIVAL_TIMEOUT", _ARRIVAL_S),
            opened_at=opened_at,
            role=role or find_role(identity),
        )
        ctx = enter(_join(request, store))
        try:
            _ = ctx if mesh is None else ctx.mesh(mesh)
        except RankwiseError:
            ctx.close()
            raise
        else:
            return ctx
    except RankwiseError as error:
        # The frames in between are ours: they would only hide the line of the call.
        raise error.with_traceback(None) from error.__cause__


def find_role(identity: Identity) -> str | None:
    """Return what the environment says this rank is, in a job that has servers of parameters."""
    roles = list_roles(read_counts(get(COUNTS)))
    is_theirs = len(roles) == identity.world_size and any(one.name == "ps" for one in roles)
    return roles[identity.rank].name if is_theirs else identity.role


def _check_not_open() -> None:
    context = find_current()
    is_grouped = dist.is_initialized() and context is not None and dist.group.WORLD is context.group
    if context is not None and (is_grouped or context.role is not None):
        raise UsageError(
            f"this process has already joined a job, at {context.opened_at}",
            rank=context.rank,
            hint="use rankwise.current() for the context, or close it before you join again",
        )
    if context is None and dist.is_initialized():
        raise UsageError(
            "this process already has a process group, which rankwise.init() did not create",
            rank=dist.get_rank(),
            hint="remove the other init_process_group (a framework may have called it), or rankwise.init()",
        )
    if context is not None:
        context.close()  # the script destroyed the group under it


def _to_seconds(value: object, name: str) -> float | None:
    seconds = None if value is None else read_seconds(value)
    if value is not None and seconds is None:
        raise UsageError(f"{name}={value!r} is not a number of seconds above 0", hint=f"for example {name}=300")
    return seconds


# ------------------------------------------------------------------ joining


def _join(request: _Request, given: dist.Store | None) -> RankContext:
    prepare_exit()
    it, place = request.identity, request.place
    if it.local_rank is not None or it.world_size == 1:
        device = choose_device(request.device, it.local_rank or 0, it.rank)
        backend = choose_backend(request.backend, device, it.rank)
    else:
        # The handshake will tell our place on this host; only then is a device picked.
        device, backend = None, choose_backend(request.backend, find_kind(request.device, it.rank), it.rank)
    _check_gloo_interface(backend, it.rank)
    store, result = _meet(request, given, _describe(it, backend, device))
    it = _complete(it, result)
    if device is None:
        device = choose_device(request.device, it.local_rank or 0, it.rank)
    timeout_s = request.timeout_s or (600.0 if "nccl" in backend else 1800.0)
    groups, registry = dist.PrefixStore(GROUP_PREFIX, store), dist.PrefixStore(RENDEZVOUS_PREFIX, store)
    corner, side, refusal = dist.PrefixStore("rankwise/job", store), None, ""
    if request.role is None:
        side = connect(it, place, backend, device, store=groups, registry=registry, timeout_s=timeout_s)
    else:
        note_apart()
        corner.set(f"role/{it.rank}", request.role)
        refusal = "the ranks of this job have roles, and no process group of all of them"
    if it.world_size > 1 and request.role is None:
        corner.add("connected", 1)
    return RankContext(
        rank=it.rank, world_size=it.world_size, local_rank=it.local_rank or 0, local_world_size=it.local_world_size or 1,
        node_rank=it.node_rank or 0, num_nodes=it.num_nodes or 1, device=device, backend=backend, timeout_s=timeout_s,
        group=dist.group.WORLD, control=Control(side, ranks=range(it.world_size), rank=it.rank, store=corner, timeout_s=timeout_s, refusal=refusal),
        store=corner, source=it.source, opened_at=request.opened_at, serves=_serves(it, place), role=request.role, _lay_mesh=lay_mesh,
    )  # fmt: skip


def _serves(it: Identity, place: Place) -> bool:
    """Whether the store goes with this process."""
    return place.kind == "tcp" and not place.is_served and it.rank == 0


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
        how = "name one of these, or unset it"
        if wanted[0] in "^=":
            how = "Gloo knows no exclusions (^) and no prefixes, as NCCL does: name one interface"
        raise UsageError(
            f"GLOO_SOCKET_IFNAME={wanted}: this host has no interface {', '.join(missing)}, but {', '.join(names)}",
            rank=rank,
            hint=how,
        )


def _meet(request: _Request, given: dist.Store | None, record: Record) -> tuple[dist.Store, HandshakeResult]:
    """Open the store and shake hands, all within a bound: a store whose host is frozen blocks its clients for ever."""
    it, place, bound_s = request.identity, request.place, request.arrival_timeout_s
    generation = _count_rendezvous(place, given)
    try:
        if given is not None:
            raw = given
        elif place.kind == "alone":
            raw = dist.HashStore()
        else:
            opening = partial(open_store, place, rank=it.rank, world_size=it.world_size, timeout_s=bound_s)
            raw = call_within(bound_s + _GRACE_S, partial(opening, clock=SYSTEM_CLOCK, notice=_say))
        store = dist.PrefixStore(f"{place.attempt}.{generation}", raw)
        if place.kind == "alone" or request.role is not None or get("RANKWISE_HANDSHAKE") in {"0", "off"}:
            nodes, num_nodes = [[0]] if place.kind == "alone" else None, it.num_nodes or 1
            return store, HandshakeResult(ranks_by_node=nodes, num_nodes=num_nodes, clock_skew_s=None, doubts=())
        result = call_within(
            bound_s + _GRACE_S,
            lambda: shake_hands(
                dist.PrefixStore(RENDEZVOUS_PREFIX, store), record, timeout_s=bound_s,
                strict=get("RANKWISE_HANDSHAKE") != "lenient", serves=_serves(it, place), clock=SYSTEM_CLOCK, notice=_say,
            ),
        )  # fmt: skip
    except OverdueError:
        raise RendezvousError(
            f"the store at {place} was reached, but did not answer",
            rank=it.rank,
            hint="the process that serves it (rank 0, or the launcher) is stopped, or its host is: look there first",
        ) from None
    except dist.DistError as error:
        raise RendezvousError(
            f"the store at {place} failed: {str(error).splitlines()[0]}",
            rank=it.rank,
            hint="the process that serves it (rank 0, or the launcher) has probably ended: look at its output",
        ) from error
    _report(result, it)
    return store, result


def _count_rendezvous(place: Place, given: dist.Store | None) -> int:
    """Return how often this process has met others here already: each time under a prefix of its own."""
    counts: MutableMapping[Any, int] = _rendezvous_seen if given is None else _given
    key = f"{place}#{place.attempt}" if given is None else given
    counts[key] = counts.get(key, -1) + 1
    return counts[key]


def _report(result: HandshakeResult, it: Identity) -> None:
    if it.rank == 0:
        for doubt in result.doubts:
            _say(doubt, logging.WARNING)
    if result.clock_skew_s is not None and not it.local_rank:
        _say(
            f"warning: [rank {it.rank}] the clock of {socket.gethostname()} is {result.clock_skew_s:+.0f} s off another host's of this job"
        )


def _complete(it: Identity, result: HandshakeResult) -> Identity:
    """Fill in what the variables did not tell."""
    it = replace(it, num_nodes=it.num_nodes or result.num_nodes)
    if result.ranks_by_node is None:
        return it
    node = next(number for number, ranks in enumerate(result.ranks_by_node) if it.rank in ranks)
    here = result.ranks_by_node[node]
    return replace(
        it,
        local_rank=here.index(it.rank) if it.local_rank is None else it.local_rank,
        local_world_size=it.local_world_size or len(here),
        node_rank=node if it.node_rank is None else it.node_rank,
    )


@atexit.register
def _leave_at_exit() -> None:
    if find_current() is not None:
        leave_all()
        let_threads_settle()


def _say(text: str, level: int = logging.INFO) -> None:
    if text not in _warned:
        _warned.add(text)
        _LOGGER.log(level, text)


# ------------------------------------------------------------------ the mesh

# torch 2.15 has a public one, and warns of the other.
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def lay_mesh(ctx: RankContext, wanted: Mapping[str, int] | DeviceMesh) -> Mesh:
    """Lay the ranks of a job out as a grid.

    Args:
        ctx: The job.
        wanted: How many ranks each axis has, of which one may be -1: all that are left. Or a mesh of torch's whose axes
            have names.

    Raises:
        UsageError: Degrees that don't make up the number of ranks, or an unknown axis.
        CollectiveError: The ranks ask for different ones.

    Collective: every rank.
    """
    if isinstance(wanted, DeviceMesh):
        return _adopt_mesh(ctx, wanted)
    degrees = read_degrees(wanted, ctx.world_size, rank=ctx.rank)
    ctx.agree(show_degrees(degrees), "the mesh")
    sizes = {axis: size for axis, size in degrees.items() if axis in rename_axes(wanted) or size > 1}
    if sizes.get("replicate", 1) > 1 and len(sizes) > 1:
        # Copies of a model that is cut by other axes are those of hybrid sharding, whose mesh has both.
        sizes = {axis: degrees[axis] for axis in AXES if axis in {*sizes, "shard"}}
    sizes = sizes or {"replicate": 1}
    device_mesh = init_device_mesh(ctx.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for dim in range(device_mesh.ndim):  # torch gives the groups of a mesh the backend's default
        set_timeout(timedelta(seconds=ctx.timeout_s), device_mesh.get_group(dim))
    if ctx.is_main and ctx.local_world_size % degrees["tensor"] and ctx.num_nodes > 1:
        ctx.print(
            f"rankwise: warning: the tensor axis of {degrees['tensor']} ranks spans hosts of {ctx.local_world_size}: each layer waits for the network between them"
        )
    return _make_mesh(ctx, degrees, device_mesh)


def _adopt_mesh(ctx: RankContext, device_mesh: DeviceMesh) -> Mesh:
    names = device_mesh.mesh_dim_names
    if not names:
        raise UsageError(
            f"a DeviceMesh of shape {tuple(device_mesh.mesh.shape)} without names: which axis is which?",
            rank=ctx.rank,
            hint="init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))",
        )
    sizes = {name: device_mesh.size(dim) for dim, name in enumerate(names)}
    degrees = read_degrees(sizes, ctx.world_size, rank=ctx.rank)
    order = list(rename_axes(sizes))
    if order != [axis for axis in AXES if axis in order]:
        raise UsageError(
            f"the DeviceMesh has its axes in the order {', '.join(names)}",
            rank=ctx.rank,
            hint=f"outermost first they are {', '.join(AXES)}",
        )
    ctx.agree((show_degrees(degrees), device_mesh.mesh.flatten().tolist()), "the mesh")
    return _make_mesh(ctx, degrees, device_mesh)


def _forget_plans() -> None:
    """Forget what DTensor has worked out on this mesh: an equal one, of a job that is joined later, has other groups (torch 2.8 to 2.15)."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute, debug  # noqa: PLC0415 - loaded already, or nothing is to be done

    propagated: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if propagated is None:  # torch 2.8
        propagated = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    for forget in (propagated, clear, _redistribute._gen_transform_infos.cache_clear):
        if forget is not None:
            forget()


def _make_mesh(ctx: RankContext, degrees: dict[str, int], device_mesh: DeviceMesh) -> Mesh:
    grid: Any = device_mesh.mesh.reshape([degrees[axis] for axis in AXES])
    place = (grid == ctx.rank).nonzero().flatten().tolist()
    ctx._before_leaving.append(_forget_plans)
    coordinates = rename_axes(dict(zip(device_mesh.mesh_dim_names or (), device_mesh.get_coordinate(), strict=True)))
    return Mesh(
        degrees=degrees,
        position={axis: coordinates.get(axis, at) for axis, at in zip(AXES, place, strict=True)},
        device_mesh=device_mesh,
        data_ranks=tuple(grid[0, :, :, 0].flatten().tolist()),
    )
