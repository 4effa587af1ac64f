"""tf's names that are not here, and what to use instead."""

from __future__ import annotations

import difflib
import sys
from enum import EnumMeta
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Names of tf's modules: all that is in them is in this room.
MODULES = ("distribute", "experimental", "cluster_resolver", "coordinator", "partitioners", "nn", "train")
_DEVICES = (
    "place layers by rankwise.place, split them by rankwise.apply_tensor_parallel, or shard them by rankwise.apply_fsdp"
)
_LEFT_OUT = {
    "TPUStrategy": "MirroredStrategy() on this host's GPUs, MultiWorkerMirroredStrategy() on several hosts",
    "TPUClusterResolver": "a launcher's variables are read by MultiWorkerMirroredStrategy()",
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
    "experimental_set_strategy": "with strategy.scope(): model = ...; optimizer = ...",
    "StrategyExtended": "strategy.reduce, gather, run and scope",
    "RunOptions": "leave options out of run()",
    "function": "leave the decorator out; torch.compile(model) compiles",
    "GradientTape": "loss.backward()",
    "keras": "torch.nn and torch.optim; rankwise.Trainer in place of fit(); tf.BackupAndRestore in place of the callback",
    "data": "torch.utils.data, or rankwise.DataLoader; AutoShardPolicy is tf.AutoShardPolicy, for tf.InputOptions(auto_shard_policy=...)",
    "device": "tensor.to(device); the replica's is strategy.device",
    "rpc": "rankwise.parameter_server(..., coordinator=True)",
    "scale_loss": "scale_regularization_loss(loss), or compute_average_loss(losses, global_batch_size=...)",
    "DTensor": _DEVICES,
    "dtensor": _DEVICES,
}
#: The same, of a strategy's attributes.
_METHODS_LEFT_OUT = {
    "extended": "reduce(), gather() and run(); in a replica's function get_replica_context().merge_call",
    "experimental_distribute_values_from_function": "call the function: values of replicas are ordinary values of each process",
}
_TORCH = (
    "in torch: torch.tensor makes tensors, torch.manual_seed seeds, torch.cuda has the devices, torch.nn and torch.nn.functional the layers, "
    "torch.optim the optimizers, torch.utils.tensorboard the summaries; rankwise.checkpoint saves"
)


@final
class MissingNameError(UsageError, AttributeError):
    """A name of tf that is not here; an ``AttributeError``, so that ``hasattr`` answers."""


def explain(name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a name that tf may have, and this room has not."""
    if name.startswith("__"):  # asked for by Python's own machinery
        return AttributeError(f"module 'rankwise.tf' has no attribute {name!r}")
    if name in _LEFT_OUT:
        return MissingNameError(f"rankwise.tf has no {name}", hint=_LEFT_OUT[name])
    near, same = _find_near(name, known), _find_in_torch(name)
    if near is not None:
        hint = f"the nearest name here is tf.{near}"
    else:
        hint = f"in torch there is {same}" if same else _TORCH
    return MissingNameError(f"rankwise.tf has the names of tf.distribute only, and no {name}", hint=hint)


def explain_method(strategy: Any, name: str) -> AttributeError:
    """Return the error for an attribute that tf's strategies may have, and ours have not."""
    kind, rank = type(strategy), vars(strategy).get("rank")
    if name in _METHODS_LEFT_OUT:
        hint = _METHODS_LEFT_OUT[name]
        return MissingNameError(f"strategy.{name} has no meaning on torch", rank=rank, hint=hint)
    near = None if name.startswith("_") else _find_near(name, dir(kind))
    if near is None:
        return AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
    hint = f"the nearest name here is strategy.{near}"
    return MissingNameError(f"{kind.__name__} has no {name}", rank=rank, hint=hint)


class NamedMembers(EnumMeta):
    """Has an enumeration say what its members are when tf's has more."""

    def __getattr__(cls, name: str) -> Any:
        """Find a member, which older Pythons look for here, or raise."""
        members = type.__getattribute__(cls, "__dict__").get("_member_map_", {})
        if name in members:
            return members[name]
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingNameError(f"{cls.__name__} has no {name}", hint=f"its members are {', '.join(members)}")


def _find_near(name: str, known: Iterable[str]) -> str | None:
    plain = name.removeprefix("experimental_")
    return next(iter(difflib.get_close_matches(plain, [*known], n=1, cutoff=0.75)), None)


def _find_in_torch(name: str) -> str | None:
    """Return what torch has under this name. It is not imported for this: whoever looks at the room may not want it."""
    for place in ("torch", "torch.nn.functional", "torch.nn", "torch.optim", "torch.cuda"):
        found = getattr(sys.modules.get(place), name, None)
        if found is not None and not (isinstance(found, ModuleType) and not found.__name__.startswith("torch")):
            return f"{place}.{name}"
    return None
