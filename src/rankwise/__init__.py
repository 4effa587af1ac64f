"""Run any PyTorch training program on many processes, GPUs and machines.

Public names are loaded on first use (PEP 562), so that the launcher's parent process stays plain Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from rankwise import checkpoint as checkpoint, tf as tf, train as train
    from rankwise.base.environ import RankEnv as RankEnv
    from rankwise.base.errors import (
        CheckpointError as CheckpointError,
        CollectiveError as CollectiveError,
        CollectiveTimeoutError as CollectiveTimeoutError,
        DataError as DataError,
        HandshakeError as HandshakeError,
        LaunchError as LaunchError,
        ModelError as ModelError,
        NumericsError as NumericsError,
        RankFailedError as RankFailedError,
        RankwiseError as RankwiseError,
        RendezvousError as RendezvousError,
        UsageError as UsageError,
    )
    from rankwise.base.requeue import REQUEUE as REQUEUE
    from rankwise.cluster.cluster import JobState as JobState
    from rankwise.cluster.submission import JobHandle as JobHandle
    from rankwise.data.distributed_sampler import DistributedSampler as DistributedSampler
    from rankwise.data.evaluation import evaluate as evaluate, predict as predict
    from rankwise.data.loader import DataLoader as DataLoader
    from rankwise.data.sampler import GlobalBatchSampler as GlobalBatchSampler
    from rankwise.data.steps import Step as Step
    from rankwise.launcher.function import launch as launch
    from rankwise.parallel.accumulation import accumulate as accumulate, loss_scale as loss_scale
    from rankwise.parallel.checkpointing import apply_checkpointing as apply_checkpointing
    from rankwise.parallel.clipping import clip_grad_norm_ as clip_grad_norm_
    from rankwise.parallel.ddp import PowerSGD as PowerSGD, Tuning as Tuning, apply_ddp as apply_ddp
    from rankwise.parallel.fsdp import apply_fsdp as apply_fsdp
    from rankwise.parallel.model_check import check_replicas as check_replicas
    from rankwise.parallel.parameter_server import (
        ParameterServer as ParameterServer,
        parameter_server as parameter_server,
    )
    from rankwise.parallel.pipeline import Pipeline as Pipeline, apply_pipeline as apply_pipeline
    from rankwise.parallel.pipeline_profile import PipelineProfile as PipelineProfile
    from rankwise.parallel.placement import place as place
    from rankwise.parallel.placement_hooks import Placement as Placement, placement_of as placement_of
    from rankwise.parallel.planning import Plan as Plan, plan as plan
    from rankwise.parallel.servers.embedding import ServedEmbedding as ServedEmbedding
    from rankwise.parallel.sync_batchnorm import (
        SyncBatchNorm as SyncBatchNorm,
        convert_sync_batchnorm as convert_sync_batchnorm,
    )
    from rankwise.parallel.tensor import apply_tensor_parallel as apply_tensor_parallel
    from rankwise.parallel.zero import apply_zero1 as apply_zero1
    from rankwise.runtime.batch import BatchPlan as BatchPlan
    from rankwise.runtime.collectives import (
        Group as Group,
        all_gather as all_gather,
        all_gather_into as all_gather_into,
        all_gather_with_grad as all_gather_with_grad,
        all_reduce as all_reduce,
        all_reduce_ as all_reduce_,
        all_reduce_with_grad as all_reduce_with_grad,
        all_to_all as all_to_all,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_ as broadcast_,
        gather as gather,
        gather_into as gather_into,
        new_group as new_group,
        reduce as reduce,
        reduce_scatter as reduce_scatter,
        scatter as scatter,
        set_checking as set_checking,
    )
    from rankwise.runtime.context import RankContext as RankContext, current as current
    from rankwise.runtime.joining import init as init
    from rankwise.runtime.mesh import Mesh as Mesh
    from rankwise.train.config import TrainerConfig as TrainerConfig
    from rankwise.train.trainer import Trainer as Trainer

_NAMES = {
    "rankwise.base.environ": "RankEnv",
    "rankwise.base.requeue": "REQUEUE",
    "rankwise.cluster.cluster": "JobState",
    "rankwise.cluster.submission": "JobHandle",
    "rankwise.launcher.submit": "submit",
    "rankwise.base.errors": "CheckpointError CollectiveError CollectiveTimeoutError DataError HandshakeError LaunchError ModelError NumericsError RankFailedError RankwiseError RendezvousError UsageError",
    "rankwise.data.distributed_sampler": "DistributedSampler",
    "rankwise.data.evaluation": "evaluate predict",
    "rankwise.data.loader": "DataLoader",
    "rankwise.data.sampler": "GlobalBatchSampler",
    "rankwise.data.steps": "Step",
    "rankwise.launcher.function": "launch",
    "rankwise.parallel.accumulation": "accumulate loss_scale",
    "rankwise.parallel.clipping": "clip_grad_norm_",
    "rankwise.parallel.ddp": "PowerSGD Tuning apply_ddp",
    "rankwise.parallel.checkpointing": "apply_checkpointing",
    "rankwise.parallel.fsdp": "apply_fsdp",
    "rankwise.parallel.pipeline": "Pipeline apply_pipeline",
    "rankwise.parallel.pipeline_profile": "PipelineProfile",
    "rankwise.parallel.model_check": "check_replicas",
    "rankwise.parallel.parameter_server": "ParameterServer parameter_server",
    "rankwise.parallel.placement_hooks": "Placement placement_of",
    "rankwise.parallel.placement": "place",
    "rankwise.parallel.planning": "Plan plan",
    "rankwise.parallel.servers.embedding": "ServedEmbedding",
    "rankwise.parallel.sync_batchnorm": "SyncBatchNorm convert_sync_batchnorm",
    "rankwise.parallel.zero": "apply_zero1",
    "rankwise.parallel.tensor": "apply_tensor_parallel",
    "rankwise.runtime.batch": "BatchPlan",
    "rankwise.runtime.collectives": "Group all_gather all_gather_into all_gather_with_grad all_reduce all_reduce_ all_reduce_with_grad all_to_all barrier broadcast broadcast_ gather gather_into new_group reduce reduce_scatter scatter set_checking",
    "rankwise.runtime.context": "RankContext current",
    "rankwise.runtime.joining": "init",
    "rankwise.runtime.mesh": "Mesh",
    "rankwise.train.config": "TrainerConfig",
    "rankwise.train.trainer": "Trainer",
}
_ROOMS = ("checkpoint", "tf", "train")
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME, *_ROOMS, "__version__"]  # noqa: PLE0604 - strings all


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value  # asked for once
        return value
    if name in _ROOMS:
        from importlib import import_module

        return import_module(f"rankwise.{name}")
    raise AttributeError(f"module 'rankwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
