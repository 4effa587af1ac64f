"""How ranks, collectives and places are put into words."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from rankwise.verdict.group_sequences import find_family

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rankwise.evidence.in_rank.pipeline_stages import Flow
    from rankwise.evidence.reader.scene import Op

#: Functions of FSDP, the first and the second one, in which it gathers what it has spread.
_UNSHARDING = frozenset({
    "_pre_forward", "_pre_backward", "_pre_forward_unshard", "_pre_backward_hook", "_all_gather_flat_param",
    "foreach_all_gather",
})  # fmt: skip


#: Functions of FSDP2, one of which is called for every module; in the second gradients are reduced.
_GATHERS, _REDUCES = "foreach_all_gather", "foreach_reduce"
#: Of torch's ZeroRedundancyOptimizer.
_SYNCS = frozenset({"_sync_params", "_broadcast_params_from_rank"})


def name_op(op: Op | None, *, number: bool = True) -> str:
    """Return ``all_reduce #812 (25.6 M float32, gradients)``; of a module ``all_gather of layers.3 (#812, 4.2 M float32, FSDP parameters)``."""
    if op is None:
        return "a collective"
    if op.library_call is not None:
        return op.library_call
    has_number = number and not op.is_message
    message = f"{op.name} #{op.seq}" if has_number and op.module is None else name_briefly(op)
    if op.flow is not None:
        return f"{message} (rank {op.peer}, {name_tensors(op)})"
    if op.is_message and op.peer is not None and op.peer >= 0:
        message += f" {'to' if op.is_send else 'from'} rank {op.peer}"
    first = f"#{op.seq}" if has_number and op.module is not None else ""
    details = [text for text in (first, name_tensors(op), find_purpose(op)) if text]
    return f"{message} ({', '.join(details)})" if details else message


def name_briefly(op: Op) -> str:
    """Return ``all_reduce``, or of a module ``all_gather of layers.3``; of a pipeline ``irecv of activations of micro-batch 3 from stage 1``."""
    if op.module is None:
        return op.name
    if op.flow is not None:
        return f"{op.name} of {_name_load(op.flow)} {'to' if op.is_send else 'from'} stage {op.flow.other}"
    return f"{find_family(op) or op.name} of {name_module(op.module)}"


def name_wait(op: Op, flow: Flow) -> str:
    """Return what a stage waits for: ``for activations of micro-batch 3 from stage 1``."""
    if op.is_send:
        return f"for stage {flow.other} to take {_name_load(flow)}"
    return f"for {_name_load(flow)} from stage {flow.other}"


def name_stages(stages: Collection[int]) -> str:
    """Return ``stage 2``, or ``stages 1, 5``."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, sorted(stages)))}"


def _name_load(flow: Flow) -> str:
    return f"{flow.carries} of micro-batch {flow.micro_batch}"


def name_module(module: str) -> str:
    """Return a module's name; that of the outermost one in words, as it has none, and ``module 3`` where it is a number alone."""
    if module == ".":
        return "the root module"
    return f"module {module}" if module.replace(".", "").isdecimal() else module


def name_tensors(op: Op) -> str:
    """Return ``[2, 3] float32``, or for many or long tensors ``25.6 M float32``."""
    if not op.shapes or op.name == "barrier":
        return ""
    dtype = "/".join(dict.fromkeys(op.dtypes))
    if len(op.shapes) == 1 and (op.num_elements or 0) < 1_000_000:
        return f"{list(op.shapes[0])} {dtype}".strip()
    return f"{count_briefly(op.num_elements or 0)} {dtype}".strip()


def count_briefly(number: int) -> str:
    """Return ``25.6 M`` for 25600000."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if number >= size:
            return f"{number / (size if unit != 'k' else 1000):.1f} {unit}"
    return str(number)


def find_purpose(op: Op) -> str:
    """Return what torch makes this collective for, where it is not the user's own."""
    known: tuple[tuple[Callable[[Op], bool], str], ...] = (
        (is_gradient, "DDP gradients"),
        (is_buffers, "DDP buffers, before forward"),
        (is_shards, "FSDP parameters"),
        (is_shard_gradient, "FSDP gradients"),
        (is_redistribution, "tensor parallel"),
        (lambda op: bool(_SYNCS & set(op.inside)), "ZeRO parameters, after the step"),
        (is_wrapping, "DDP comparing the models"),
        (is_of_shapes, "shapes of a pipeline, before its first micro-batch"),
    )
    return next((purpose for holds, purpose in known if holds(op)), "")


def is_gradient(op: Op) -> bool:
    """Tell whether it is a bucket of gradients, issued inside a backward pass."""
    return op.source == "native" and is_in_backward(op) and not is_redistribution(op)


def is_in_backward(op: Op) -> bool:
    """Tell whether a backward pass has issued it."""
    return bool({"backward", "_engine_run_backward"} & set(op.inside))


def is_sharded_pass(op: Op) -> bool:
    """Tell whether a forward or backward pass of a sharded model has issued it: by FSDP, or by tensor parallel."""
    return is_shards(op) or is_shard_gradient(op) or is_redistribution(op)


def is_redistribution(op: Op) -> bool:
    """Tell whether a DTensor changes its layout by it, as in a model whose layers are split."""
    return bool({"redistribute", "redistribute_local_tensor"} & set(op.inside))


def is_buffers(op: Op) -> bool:
    """Tell whether it is the broadcast of buffers with which DDP begins a forward pass."""
    inside = set(op.inside)
    # FSDP has a _pre_forward, too, in which it gathers.
    return bool({"_sync_buffers", "_sync_module_buffers"} & inside) or (
        "_pre_forward" in inside and find_family(op) == "broadcast"
    )


def is_shards(op: Op) -> bool:
    """Tell whether FSDP gathers parameters by it, for a forward or backward pass."""
    return find_family(op) == "all_gather" and bool(_UNSHARDING & set(op.inside))


def is_shard_gradient(op: Op) -> bool:
    """Tell whether FSDP2 reduces the gradients of a module by it."""
    return _REDUCES in op.inside


def is_of_shards(op: Op) -> bool:
    """Tell whether FSDP2 makes it for one module, the same one on all ranks."""
    return op.module is not None and (_GATHERS in op.inside or is_shard_gradient(op))


def is_wrapping(op: Op) -> bool:
    """Tell whether it belongs to the construction of DDP."""
    return bool({"_verify_param_shape_across_processes", "_sync_module_states", "_ddp_init_helper"} & set(op.inside))


def is_of_shapes(op: Op) -> bool:
    """Tell whether the stages of a pipeline exchange by it what shapes they will send."""
    return bool({"_prepare_forward_infra", "_prepare_backward_infra", "_shape_inference"} & set(op.inside))


def is_join(op: Op) -> bool:
    """Tell whether it is one that a rank makes for others under Join, with nothing of its own to give."""
    return any("join" in name or name.startswith("_match_") or name == "main_hook" for name in op.inside)


def shorten(where: str | None) -> str:
    """Return a place without its folders: ``train.py:57``."""
    return "an unknown line" if where is None else PurePath(where).name


def verb(ranks: Sequence[int], plural: str, singular: str | None = None) -> str:
    """Return the verb that fits their number: ``wait`` or ``waits``."""
    return plural if len(ranks) > 1 else singular or f"{plural}s"


def join_clauses(clauses: Sequence[str], most: int = 4, mark: str = "; ") -> str:
    """Join clauses, and count those that are too many to be read."""
    shown = list(clauses[:most])
    if len(clauses) > most:
        shown.append(f"{len(clauses) - most} more")
    return mark.join(shown)
