"""What each of several hosts must know before it starts, from the flags and the environment: where the coordinator is, how many hosts there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rankwise.base.errors import RendezvousError, UsageError
from rankwise.base.host import is_loopback, is_unspecified
from rankwise.base.host_list import expand_hosts
from rankwise.base.identity import Identity, read_identity
from rankwise.doctor.multi_host.wire import SILENCE_S
from rankwise.doctor.probe import Reading
from rankwise.doctor.variables.places import DEFAULT_PORT, find_place, try_read


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a host knows of the rendezvous; None is what nobody has said.

    Attributes:
        endpoint_host: Where the hosts meet: a name or an address of one of them.
        is_coordinator: Whether the rendezvous is at this host; None: it is if the endpoint's address is its own.
        expected: Names of the hosts that are to come; may be empty.
        token: What this rendezvous calls itself: two of them at one port do not mix.
        listen_address: Where to listen, and from where to join, in the place of Gloo's and NCCL's addresses: for
            many hosts that are simulated by one. Their names mean nothing then, and are not looked up. They wait for
            its cores: others may take ``timeout_factor`` times as long.
    """

    endpoint_host: str
    endpoint_port: int
    num_hosts: int | None = None
    node_rank: int | None = None
    is_coordinator: bool | None = None
    expected: tuple[str, ...] = ()
    arrival_timeout_s: float = 30.0
    seconds_per_link: float = 0.25
    measure: bool = True
    all_reduce: bool = False
    token: str = ""
    listen_address: str = ""
    timeout_factor: int = 1

    @property
    def silence_s(self) -> float:
        """After so long a silence the other side is taken for dead."""
        return SILENCE_S * self.timeout_factor

    @property
    def endpoint(self) -> str:
        """The endpoint as it is written: ``node0:29500``."""
        host = f"[{self.endpoint_host}]" if ":" in self.endpoint_host else self.endpoint_host
        return f"{host}:{self.endpoint_port}"


class JoinError(RendezvousError):
    """This host could not take part in the rendezvous, or lost it: with what to do, and the failure class that a job would meet here."""

    def __init__(self, message: str, fix: str, class_id: str = "") -> None:
        super().__init__(message, hint=fix)
        self.fix, self.class_id = fix, class_id

    def to_reading(self) -> Reading:
        """Return it as a reading of ``rendezvous``."""
        why = "the ranks of this host would not find those of the others, and all would wait in init_process_group until their timeout"
        return Reading("fail", self.message, why, self.fix, self.class_id, probe="rendezvous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """What the user has said of the hosts: how many, which one this is, where they meet (``endpoint``: whichever node serves there)."""

    num_hosts: int | None = None
    node_rank: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    endpoint: str = ""


def find_plan(requested: Requested, env: Mapping[str, str]) -> Plan | Literal["bystander"] | None:
    """Return how this host takes part, by what the user says, which wins, and by the environment; None if it is alone.

    Of several processes of a host the first takes part, and the others are bystanders.

    Raises:
        UsageError: It is not said where several hosts meet, or the place can't be one.
    """
    if requested.num_hosts == 1:
        return None
    if requested.num_hosts:
        count, rank = requested.num_hosts, requested.node_rank
        plan = Plan(endpoint_host="", endpoint_port=DEFAULT_PORT, num_hosts=count, node_rank=rank)
        return _settle(plan, requested, rank, f"there are {count} hosts")
    # Where the variables can't be read, their own probe says so.
    identity = try_read(read_identity, env)
    if identity is None:
        return _plan_by_place(requested, env)
    is_spread = identity.local_world_size is not None and identity.local_world_size < identity.world_size
    has_several = is_spread if identity.num_nodes is None else identity.num_nodes > 1
    return _plan_by(identity, requested, env) if has_several else _plan_by_place(requested, env)


def _settle(plan: Plan, requested: Requested, first: int | None, says: str) -> Plan:
    """Return a plan with the place that the user names, and whether this host is the coordinator, by its node rank or its rank.

    UsageError: there is no place, though something ``says`` that there are several hosts, or they can't meet there.
    """
    given, port = read_place(requested)
    is_coordinator, host = None if requested.endpoint or first is None else first == 0, given or plan.endpoint_host
    if not host:
        what = f"{says}, but nothing says where they rendezvous"
        raise UsageError(what, hint="--master-addr ADDRESS-OF-THE-FIRST-HOST")
    # At all of its addresses the first host can listen, and the others may be told one of them.
    if is_loopback(host) or (is_unspecified(host) and not is_coordinator):
        what = f"several hosts can't rendezvous at {host}: that is a different host on each of them"
        raise UsageError(what, hint="give an address of node 0 that the others reach")
    return replace(plan, endpoint_host=host, endpoint_port=port or plan.endpoint_port, is_coordinator=is_coordinator)


def _plan_by(identity: Identity, requested: Requested, env: Mapping[str, str]) -> Plan | Literal["bystander"]:
    """Return the plan of a process that a launcher has started: of several on a host the first takes part."""
    if identity.local_rank:
        return "bystander"
    plan = Plan(
        endpoint_host=identity.master_addr or "", endpoint_port=identity.master_port or DEFAULT_PORT, num_hosts=identity.num_nodes, node_rank=identity.node_rank,
        expected=expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")), token=env.get("SLURM_JOB_ID", ""),
    )  # fmt: skip
    return _settle(plan, requested, identity.rank, f"{identity.source} shows that there are several hosts")


def _plan_by_place(requested: Requested, env: Mapping[str, str]) -> Plan | None:
    """Return the plan of a node that a cluster has set up for a launcher; None for a batch script, which runs on its first node only."""
    place = find_place(env)
    if place is None or place.num_nodes is None or place.num_nodes < 2 or is_batch_script(env):
        return None
    host, _, port = env.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    host = env.get("PET_MASTER_ADDR") or host or env.get("MASTER_ADDR", "")
    ports = (env.get("PET_MASTER_PORT", ""), port, env.get("MASTER_PORT", ""))
    at, rank = int(next(filter(str.isdecimal, ports), DEFAULT_PORT)), place.node_rank
    plan = Plan(endpoint_host=host, endpoint_port=at, num_hosts=place.num_nodes, node_rank=rank)
    return _settle(plan, requested, rank, f"{place.source} says that this is one of {place.num_nodes} nodes")


def is_batch_script(env: Mapping[str, str]) -> bool:
    """Return whether this is a Slurm job's script, and no step of it."""
    return "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env


def read_place(requested: Requested) -> tuple[str, int | None]:
    """Return where the user lets the hosts meet; empty and None where nothing was said; UsageError: the port is none."""
    if not requested.endpoint:
        return requested.master_addr.strip("[]"), requested.master_port
    host, colon, port = requested.endpoint.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return requested.endpoint.strip("[]"), DEFAULT_PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        what = f"--rdzv-endpoint {requested.endpoint}: {port!r} is not a port"
        raise UsageError(what, hint="HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)
