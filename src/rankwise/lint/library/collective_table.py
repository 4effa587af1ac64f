"""Library calls that ranks make together, and what they leave behind. Sources: the libraries' own documentation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from rankwise.lint.library.names import ACCELERATOR, CONTEXT, DDP, ENGINE, FABRIC, FSDP, PL_MODULE, STRATEGY

Result = Literal["equal", "local", "same", "first", "none"]


#: Where the parameters begin that a call may leave out.
_REST = frozenset({
    "op", "group", "src", "dst", "gather_list", "object_gather_list", "scatter_list", "scatter_object_input_list", "output_split_sizes",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """What a call does with the other ranks.

    Attributes:
        family: As in `history.Op`; empty: nothing is done together.
        result: ``equal`` on all ranks, ``local``, ``same`` as its arguments, the ``first`` argument itself, or
            ``none``.
        fills: Position and name of the argument that it writes to, and whether that is ``equal`` afterwards or
            ``local``.
        group: Position of the argument ``group``; None: named only.
        is_sure: Whether it is certain that it waits for other ranks.
        signature: The names of its parameters in order, of a function of torch.distributed.
    """

    family: str = ""
    result: Result = "same"
    fills: tuple[int, str, Literal["equal", "local"]] | None = None
    group: int | None = None
    is_sure: bool = True
    signature: tuple[str, ...] = ()

    @property
    def root(self) -> tuple[int, str] | None:
        """Position and name of the parameter for the rank that gives or takes."""
        return next(((at, name) for at, name in enumerate(self.signature) if name in {"src", "dst"}), None)

    @property
    def needed(self) -> tuple[str, ...]:
        """The parameters that each call must give."""
        return tuple(takewhile(lambda name: name not in _REST, self.signature))

    @property
    def takes(self) -> tuple[int, str] | None:
        """Position and name of the parameter for the tensor that this rank brings."""
        return next(
            ((at, name) for at, name in enumerate(self.signature) if name in {"tensor", "input_tensor", "input"}), None
        )


def _op(family: str = "collective", **more: object) -> Act:
    return Act(family=family, **more)  # type: ignore[arg-type]


def _named(
    signature: str,
    fills: str = "",
    spread: Literal["equal", "local"] = "equal",
    *,
    family: str = "collective",
    result: Result = "none",
    is_sure: bool = True,
) -> Act:
    names = tuple(signature.split())
    filled = (names.index(fills), fills, spread) if fills else None
    return Act(family=family, result=result, fills=filled, group=names.index("group"), is_sure=is_sure, signature=names)


_D = "torch.distributed."
_FUNCTIONS: dict[str, Act] = {
    "all_reduce": _named("tensor op group async_op", "tensor"),
    "all_reduce_coalesced": _named("tensors op group async_op", "tensors"),
    "broadcast": _named("tensor src group async_op group_src", "tensor"),
    "reduce": _named("tensor dst op group async_op group_dst", "tensor", "local"),
    "all_gather": _named("tensor_list tensor group async_op", "tensor_list"),
    "all_gather_into_tensor": _named("output_tensor input_tensor group async_op", "output_tensor"),
    "all_gather_coalesced": _named("output_tensor_lists input_tensor_list group async_op", "output_tensor_lists"),
    "_all_gather_base": _named("output_tensor input_tensor group async_op", "output_tensor"),
    "all_gather_object": _named("object_list obj group", "object_list"),
    "gather": _named("tensor gather_list dst group async_op group_dst", "gather_list", "local"),
    "gather_object": _named("obj object_gather_list dst group group_dst", "object_gather_list", "local"),
    "scatter": _named("tensor scatter_list src group async_op group_src", "tensor", "local"),
    "scatter_object_list": _named(
        "scatter_object_output_list scatter_object_input_list src group group_src",
        "scatter_object_output_list",
        "local",
    ),
    "reduce_scatter": _named("output input_list op group async_op", "output", "local"),
    "reduce_scatter_tensor": _named("output input op group async_op", "output", "local"),
    "all_to_all": _named("output_tensor_list input_tensor_list group async_op", "output_tensor_list", "local"),
    "all_to_all_single": _named("output input output_split_sizes input_split_sizes group async_op", "output", "local"),
    "broadcast_object_list": _named("object_list src group device group_src", "object_list"),
    "barrier": _named("group async_op device_ids timeout", family="barrier"),
    "monitored_barrier": _named("group timeout wait_all_ranks", family="barrier"),
    "send": _named("tensor dst group tag group_dst", family="point"),
    "recv": _named("tensor src group tag group_src", "tensor", "local", family="point", result="same"),
    "isend": _named("tensor dst group tag group_dst", family="point", result="same", is_sure=False),
    "irecv": _named("tensor src group tag group_src", "tensor", "local", family="point", result="same", is_sure=False),
    "send_object_list": _named("object_list dst group device group_dst use_batch", family="point"),
    "recv_object_list": _named(
        "object_list src group device group_src use_batch", "object_list", "local", family="point", result="same"
    ),
    "new_group": _op("group", result="equal"),
    "new_subgroups": _op("group", result="equal"),
    "new_subgroups_by_enumeration": _op("group", result="equal"),
    "split_group": _op("group", result="equal"),
    "device_mesh.init_device_mesh": _op("group", result="equal"),
    "init_device_mesh": _op("group", result="equal"),
    "batch_isend_irecv": _op("point", is_sure=False),
    "nn.all_reduce": _op(result="equal"),
    "nn.all_gather": _op(result="equal"),
    "nn.broadcast": _op(result="equal"),
    "nn.reduce_scatter": _op(result="local"),
    "nn.all_to_all": _op(result="local"),
    "_functional_collectives.all_reduce": _op(result="equal"),
    "_functional_collectives.all_gather_tensor": _op(result="equal"),
    "_functional_collectives.reduce_scatter_tensor": _op(result="local"),
    "_functional_collectives.broadcast": _op(result="equal"),
    "checkpoint.save": _op("save", result="equal"),
    "checkpoint.load": _op("save", result="none"),
    "checkpoint.async_save": _op("save", result="same"),
    "checkpoint.state_dict.get_state_dict": _op("state", is_sure=False),
    "checkpoint.state_dict.get_model_state_dict": _op("state", is_sure=False),
    "checkpoint.state_dict.get_optimizer_state_dict": _op("state", is_sure=False),
    "checkpoint.state_dict.set_model_state_dict": _op("state", is_sure=False),
    "get_world_size": Act(result="equal"),
    "tensor.distribute_tensor": _op(result="same"),
    "tensor.distribute_module": _op(result="same"),
}
_ACCELERATE = {
    "wait_for_everyone": _op("barrier", result="none"),
    "gather": _op(result="equal"),
    "gather_for_metrics": _op(result="equal"),
    "reduce": _op(result="equal"),
    "pad_across_processes": _op(result="same"),
    # Of a model that is only replicated, one process may save the state; of a sharded one all must.
    "save_state": _op("save", result="equal", is_sure=False),
    "load_state": _op("save", result="none", is_sure=False),
    "get_state_dict": _op("state", result="same", is_sure=False),
    "check_trigger": _op(result="equal"),
    "clip_grad_norm_": Act(result="same"),
}
_ACCELERATE_UTILS = {
    "gather": _op(result="equal"),
    "gather_object": _op(result="equal"),
    "broadcast": _op(result="equal"),
    "broadcast_object_list": _op(result="first", fills=(0, "object_list", "equal")),
    "reduce": _op(result="equal"),
    "pad_across_processes": _op(result="same"),
    "wait_for_everyone": _op("barrier", result="none"),
}
_FABRIC = {
    "barrier": _op("barrier", result="none"),
    "all_gather": _op(result="equal"),
    "all_reduce": _op(result="equal"),
    "broadcast": _op(result="equal"),
    "save": _op("save", result="none"),
    "load": _op("save", result="same", is_sure=False),
}
_PL_MODULE = {
    "all_gather": _op(result="equal"),
    "trainer.save_checkpoint": _op("save", result="none"),
    "trainer.strategy.barrier": _op("barrier", result="none"),
    "trainer.strategy.broadcast": _op(result="equal"),
    "trainer.strategy.reduce": _op(result="equal"),
}
_ENGINE = {
    "save_checkpoint": _op("save", result="equal"),
    "load_checkpoint": _op("save", result="same"),
    "save_16bit_model": _op("save", result="equal"),
    "save_fp16_model": _op("save", result="equal"),
    "backward": _op("backward", result="same"),
    "step": _op("collective", result="none", is_sure=False),
}
_FSDP = {
    "state_dict": _op("state"),
    "load_state_dict": _op("state", is_sure=False),
    "clip_grad_norm_": _op(result="equal"),
    "optim_state_dict": _op("state"),
    "full_optim_state_dict": _op("state"),
    "summon_full_params": _op("state"),
    "sharded_optim_state_dict": _op("state", is_sure=False),
}
#: Our own: what says "Collective" in its docstring.
_RANKWISE = {
    **dict.fromkeys(("all_reduce", "all_gather", "broadcast", "evaluate", "predict"), _op(result="equal")),
    **dict.fromkeys(("all_reduce_with_grad", "all_gather_with_grad", "all_gather_into"), _op(result="equal")),
    **dict.fromkeys(("all_reduce_", "broadcast_"), _op(result="none", fills=(0, "tree", "equal"))),
    **dict.fromkeys(
        ("gather", "gather_into", "reduce", "reduce_scatter", "scatter", "all_to_all"), _op(result="local")
    ),
    "barrier": _op("barrier", result="none"),
    "new_group": _op("group", result="equal"),
    "check_replicas": _op(result="none"),
    "checkpoint.save": _op("save"),
    "checkpoint.load": _op("save", result="equal"),
    "Trainer.fit": _op(result="equal"),
    "Trainer.evaluate": _op(result="equal"),
    "tf.CheckpointManager.save": _op("save", result="equal"),
    "tf.CheckpointManager.restore_or_initialize": _op("save", result="equal"),
    "tf.Checkpoint.restore": _op("save", result="none"),
}
ACTS: dict[str, Act] = {
    **{_D + name: act for name, act in _FUNCTIONS.items()},
    **{f"{ACCELERATOR}.{name}": act for name, act in _ACCELERATE.items()},
    **{f"accelerate.PartialState.{name}": act for name, act in _ACCELERATE.items()},
    **{f"accelerate.utils.{name}": act for name, act in _ACCELERATE_UTILS.items()},
    **{f"{FABRIC}.{name}": act for name, act in _FABRIC.items()},
    **{f"{PL_MODULE}.{name}": act for name, act in _PL_MODULE.items()},
    **{f"{ENGINE}.{name}": act for name, act in _ENGINE.items()},
    **{f"{FSDP}.{name}": act for name, act in _FSDP.items()},
    **{f"rankwise.{name}": act for name, act in _RANKWISE.items()},
    **{f"{CONTEXT}.{name}": _op(result="equal") for name in ("agree", "should_stop")},
    **{f"{STRATEGY}.{name}": _op(result="equal") for name in ("reduce", "gather")},
    f"{DDP}.state_dict": Act(result="equal"),
    "torch.distributed.tensor.DTensor.full_tensor": _op("state", result="equal"),
    "torchmetrics.Metric.compute": _op(result="equal"),
    "transformers.Trainer.evaluate": _op("collective", result="equal", is_sure=False),
    "transformers.Trainer.predict": _op("collective", result="equal", is_sure=False),
    "torch.distributed.optim.ZeroRedundancyOptimizer.consolidate_state_dict": _op("save", result="none"),
    "lightning.pytorch.Trainer.save_checkpoint": _op("save", result="none"),
    "lightning.pytorch.Trainer.strategy.barrier": _op("barrier", result="none"),
    "lightning.pytorch.Trainer.strategy.broadcast": _op(result="equal"),
    "lightning.pytorch.Trainer.fit": _op("collective", result="none"),
    "lightning.pytorch.Trainer.test": _op("collective", result="equal", is_sure=False),
    "lightning.pytorch.Trainer.validate": _op("collective", result="equal", is_sure=False),
}
