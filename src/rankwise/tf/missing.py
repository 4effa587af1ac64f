"""tf's names that have no meaning on torch, and what to use instead; and old names of those that have."""

from __future__ import annotations

from rankwise.base.errors import UsageError

#: Names of tf's modules: all that is in them is in this room.
MODULES = ("distribute", "experimental", "cluster_resolver", "coordinator", "partitioners", "nn", "train")
#: Old names, and what they are called now.
RENAMED = {
    "CollectiveCommunication": "CommunicationImplementation",
    "CollectiveHints": "CommunicationOptions",
}
_DEVICES = "place layers by rankwise.place, split them by rankwise.apply_tensor_parallel, or shard them by rankwise.apply_fsdp"
_LEFT_OUT = {
    "TPUStrategy": "MirroredStrategy() on this host's GPUs, MultiWorkerMirroredStrategy() on several hosts",
    "TPUClusterResolver": "a launcher's variables are read by MultiWorkerMirroredStrategy()",
    "GCEClusterResolver": "SimpleClusterResolver({'worker': [...]}, task_type=..., task_id=...), or rankwise run",
    "PreemptionWatcher": "ctx.should_stop() after each step: the same answer on all ranks",
    "CrossDeviceOps": "leave cross_device_ops out: the backend chooses",
    "NcclAllReduce": "leave cross_device_ops out: GPUs use NCCL",
    "HierarchicalCopyAllReduce": "leave cross_device_ops out: NCCL knows the links between GPUs",
    "ReductionToOneDevice": "leave cross_device_ops out; CentralStorageStrategy has one copy of the optimizer's state",
    "Server": "leave it out with its branch: all ranks run the whole script, and the first schedule() serves on servers and workers",
    "FixedShardsPartitioner": "MinSizePartitioner(min_shard_bytes): there are as many parts as servers",
    "MaxSizePartitioner": "MinSizePartitioner(min_shard_bytes): there are as many parts as servers",
    "DistributedValues": "values of replicas are ordinary values of each process",
    "PerReplica": "values of replicas are ordinary values of each process",
    "StrategyExtended": "strategy.reduce, gather, run and scope",
    "ReplicaContextBase": "ReplicaContext",
    "RunOptions": "leave options out of run()",
    "function": "leave the decorator out; torch.compile(model) compiles",
    "GradientTape": "loss.backward()",
    "keras": "torch.nn and torch.optim; rankwise.Trainer in place of fit()",
    "data": "torch.utils.data, or rankwise.DataLoader",
    "device": "tensor.to(device); the replica's is strategy.device",
    "rpc": "rankwise.parameter_server(..., coordinator=True)",
    "scale_loss": "scale_regularization_loss(loss), or compute_average_loss(losses, global_batch_size=...)",
    "DTensor": _DEVICES,
    "dtensor": _DEVICES,
}
#: The same, of a strategy's attributes.
METHODS = {
    "extended": "reduce(), gather() and run(); in a replica's function get_replica_context().merge_call",
    "experimental_run_v2": "run()",
    "experimental_make_numpy_dataset": "experimental_distribute_dataset(DataLoader(TensorDataset(...), batch_size=...))",
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function()",
    "make_dataset_iterator": "experimental_distribute_dataset()",
    "make_input_fn_iterator": "distribute_datasets_from_function()",
    "configure": "the launcher's variables, or a cluster resolver",
    "update_config_proto": "nothing: torch has no session",
    "experimental_split_to_logical_devices": _DEVICES,
}


def explain(name: str) -> UsageError | None:
    """Return the error for a name of tf that has no meaning here; None for any other name."""
    instead = _LEFT_OUT.get(name)
    return None if instead is None else UsageError(f"tf's {name} has no meaning on torch", hint=instead)
