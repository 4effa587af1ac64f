"""How ranks, collectives and places are put into words."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from rankwise.verdict.lanes import find_family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.facts import Op

#: Functions of FSDP, the first and the second one, in which it gathers what it has spread.
_UNSHARDING = frozenset(
    {
        "_pre_forward",
        "_pre_backward",
        "_pre_forward_unshard",
        "_pre_backward_hook",
        "_all_gather_flat_param",
        "foreach_all_gather",
    }
)


def name_op(op: Op | None, *, number: bool = True) -> str:
    """Return ``all_reduce #812 (25.6 M float32, gradients)``."""
    if op is None:
        return "a collective"
    if op.library_call is not None:
        return op.library_call
    told = f"{op.name} #{op.seq}" if number and not op.is_message else op.name
    if op.is_message and op.peer is not None and op.peer >= 0:
        told += f" {'to' if op.name in {'send', 'isend'} else 'from'} rank {op.peer}"
    details = [text for text in (name_tensors(op), find_purpose(op)) if text]
    return f"{told} ({', '.join(details)})" if details else told


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
    if is_gradient(op):
        return "DDP gradients"
    if is_buffers(op):
        return "DDP buffers, before forward"
    if is_shards(op):
        return "FSDP parameters"
    if is_wrapping(op):
        return "DDP comparing the models"
    return ""


def is_gradient(op: Op) -> bool:
    """Tell whether it is a bucket of gradients, issued inside a backward pass."""
    return op.source == "native" and bool({"backward", "_engine_run_backward"} & set(op.inside))


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


def is_wrapping(op: Op) -> bool:
    """Tell whether it belongs to the construction of DDP."""
    return bool(
        {"_verify_param_shape_across_processes", "_sync_module_states", "_ddp_init_helper"} & set(op.inside)
    )


def is_join(op: Op) -> bool:
    """Tell whether it is one that a rank makes for others under Join, with nothing of its own to give."""
    return any("join" in name or name.startswith("_match_") or name == "main_hook" for name in op.inside)


def shorten(where: str | None) -> str:
    """Return a place without its folders: ``train.py:57``."""
    return "an unknown line" if where is None else PurePath(where).name


def verb(ranks: Sequence[int], plural: str, singular: str | None = None) -> str:
    """Return the verb that fits their number: ``wait`` or ``waits``."""
    return plural if len(ranks) > 1 else singular or f"{plural}s"


def join_clauses(clauses: Sequence[str], most: int = 4) -> str:
    """Join clauses, and count those that are too many to be read."""
    shown = list(clauses[:most])
    if len(clauses) > most:
        shown.append(f"{len(clauses) - most} more beside")
    return "; ".join(shown)
