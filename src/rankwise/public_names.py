"""Where each public name lives: a table of words that imports nothing, so that it can be read without the package's face."""

from __future__ import annotations

_NAMES = {
    "rankwise.base": "__version__",
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
#: Subpackages that are public as they are.
PACKAGES = ("checkpoint", "tf", "train")
HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
