"""Run any PyTorch training program on many processes, GPUs and machines.

Public names are loaded on first use (PEP 562), so that the launcher's parent process stays plain Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise import checkpoint as checkpoint, tf as tf, train as train
    from rankwise.base import __version__ as __version__
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


def __getattr__(name: str) -> object:
    from importlib import import_module

    from rankwise.public_names import HOMES, PACKAGES

    if name == "__all__":
        return [*HOMES, *PACKAGES]
    if name in HOMES:
        value = getattr(import_module(HOMES[name]), name)
        globals()[name] = value  # asked for once
        return value
    if name in PACKAGES:
        return import_module(f"rankwise.{name}")
    raise AttributeError(f"module 'rankwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    from rankwise.public_names import HOMES, PACKAGES

    return sorted([*HOMES, *PACKAGES])
