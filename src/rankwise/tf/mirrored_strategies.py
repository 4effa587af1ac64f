"""The strategies whose replicas compute in step: one device, one host, several hosts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import UsageError
from rankwise.runtime.context import RankContext, find_current
from rankwise.runtime.joining import init
from rankwise.tf.missing import NamedMembers
from rankwise.tf.resolvers import ClusterResolver, find_resolver
from rankwise.tf.strategy import Strategy, SumOfReplicas

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommunicationImplementation(Enum, metaclass=NamedMembers):
    """What carries tensors between replicas."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@final
@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """How replicas exchange tensors.

    Attributes:
        bytes_per_pack: Of no effect: what is small travels together.
        timeout_seconds: Seconds that a collective waits for the slowest replica; None: as ``rankwise.init()``.
        implementation: AUTO: by the device; RING is Gloo.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO


def join(
    resolver: ClusterResolver | None,
    jobs: Sequence[str],
    options: CommunicationOptions | None = None,
    role: str | None = None,
) -> RankContext:
    """Return the job that this process has joined, or join it.

    Rank and addresses are the resolver's, whose jobs are in the given order among the ranks; without one the
    environment's, TF_CONFIG's among others. A rank has a role where there is no process group of all ranks.
    """
    ctx = find_current()
    if ctx is not None:
        return ctx
    options = options or CommunicationOptions()
    backend = {"AUTO": None, "RING": "gloo", "NCCL": "nccl"}[options.implementation.value]
    place: dict[str, Any] = {}
    if resolver is not None and (order := resolver.order(jobs)) is not None:
        rank, addresses = order
        place = {"rank": rank, "world_size": len(addresses), "init_method": f"tcp://{addresses[0]}"}
    return init(backend, timeout_s=options.timeout_seconds, role=role, **place)


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device: for trying a program that knows strategies.

    Args:
        device: ``"cpu"``, ``"cuda:1"``; tf's ``"/gpu:1"`` is understood.

    Raises:
        UsageError: The job has several ranks.
    """

    def __init__(self, device: str | torch.device) -> None:
        ctx = join(None, ())
        if ctx.world_size > 1:
            raise UsageError(
                f"OneDeviceStrategy in a job of {ctx.world_size} ranks: each would train a model of its own", rank=ctx.rank,
                hint="start one process, or use MirroredStrategy()",
            )  # fmt: skip
        Strategy.__init__(self, ctx, SumOfReplicas(1, 0), num_replicas=1, device=_read_device(device))


@final
class MirroredStrategy(Strategy):
    """A replica for each rank of this host: ``rankwise run --nproc-per-node 4 train.py``, or one without a launcher.

    Args:
        devices: As many as there are ranks, to be checked; None: all. Each rank has its own device.
        cross_device_ops: Of no effect: the backend chooses.

    Raises:
        UsageError: The job has several hosts, or not as many ranks as there are devices.

    Collective: every rank.
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None) -> None:  # noqa: ARG002 - tf's signature
        ctx = join(None, ())
        _check_one_host("MirroredStrategy", ctx)
        if devices is not None and len(devices) != ctx.world_size:
            raise UsageError(
                f"MirroredStrategy(devices={list(devices)}) in a job of {ctx.world_size} ranks: each replica is a process", rank=ctx.rank,
                hint=f"rankwise run --nproc-per-node {len(devices)} train.py",
            )  # fmt: skip
        num_gpus = torch.cuda.device_count() if ctx.device.type == "cuda" else 0
        if ctx.world_size == 1 and num_gpus > 1 and devices is None:
            warnings.warn(
                f"MirroredStrategy has one replica, but this host {num_gpus} GPUs: rankwise run --nproc-per-node gpu train.py starts one for each",
                stacklevel=2,
            )
        _mirror(self, ctx)


@final
class MultiWorkerMirroredStrategy(Strategy):
    """A replica for each rank of the job, on any number of hosts.

    Args:
        cluster_resolver: Who is in the job; None: from the launcher's variables, TF_CONFIG among them.
        communication_options: Of the exchange.

    Raises:
        UsageError: The resolver does not say which task this is.
        RendezvousError: The others were not found.

    Collective: every rank.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        ctx = join(cluster_resolver, ("chief", "worker"), communication_options)
        _mirror(self, ctx, resolver=cluster_resolver)


@final
class CentralStorageStrategy(Strategy):
    """As ``MirroredStrategy``, but the optimizer's state is on the first replica alone, which sends the others the moved parameters.

    Args:
        compute_devices: As ``devices`` of ``MirroredStrategy``.
        parameter_device: Of no effect: the first replica's.

    Raises:
        UsageError: The job has several hosts.

    Collective: every rank.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,  # noqa: ARG002 - tf's signature
        parameter_device: str | None = None,  # noqa: ARG002 - tf's signature
    ) -> None:
        ctx = join(None, ())
        _check_one_host("CentralStorageStrategy", ctx)
        _mirror(self, ctx, is_central=True)


def _check_one_host(name: str, ctx: RankContext) -> None:
    if ctx.num_nodes > 1:
        raise UsageError(
            f"{name} in a job of {ctx.num_nodes} hosts",
            rank=ctx.rank,
            hint="use MultiWorkerMirroredStrategy()",
        )


def _mirror(
    strategy: Strategy, ctx: RankContext, *, resolver: ClusterResolver | None = None, is_central: bool = False
) -> None:
    """Make a strategy of which each rank is a replica."""
    found = find_resolver(resolver, rank=ctx.rank, world_size=ctx.world_size)
    updates = SumOfReplicas(ctx.world_size, ctx.rank, is_central=is_central)
    Strategy.__init__(strategy, ctx, updates, num_replicas=ctx.world_size, resolver=found)


def _read_device(device: str | torch.device) -> torch.device:
    if isinstance(device, torch.device):
        return device
    name = device.lower().rpartition("/")[2].removeprefix("device:").replace("gpu", "cuda")
    return torch.device("cpu" if name.startswith("cpu") else name)
