"""Values of replicas: reduced, gathered, and cut into rows.

A value that differs between replicas (tf's ``PerReplica``) is an ordinary value here: each process holds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from rankwise.base.errors import DataError, UsageError
from rankwise.parallel.trees import map_tensors
from rankwise.runtime.collectives import all_gather, all_gather_with_grad, all_reduce, all_reduce_with_grad
from rankwise.runtime.nested import flatten, unflatten
from rankwise.tf.missing import NamedMembers


class ReduceOp(Enum, metaclass=NamedMembers):
    """How values of replicas are combined."""

    SUM = "SUM"
    MEAN = "MEAN"


def read_op(op: Any) -> ReduceOp:
    """Return the operation, which tf takes as a text too."""
    name = getattr(op, "value", op)
    if not isinstance(name, str) or name.upper() not in {"SUM", "MEAN"}:
        raise UsageError(
            f"op={op!r}", hint="ReduceOp.SUM or ReduceOp.MEAN; rankwise.all_reduce knows min, max and product"
        )
    return ReduceOp[name.upper()]


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested containers with each leaf changed."""
    return unflatten(tree, [change(leaf) for _, leaf in flatten(tree)])


def reduce_values(op: Any, value: Any, axis: int | None, num_replicas: int) -> Any:
    """Reduce a value over the replicas, and before that over one dim of each, if there is an axis; see ``Strategy.reduce``."""
    op = read_op(op)
    # Without its graph: a sum of losses over an epoch would keep that of every step.
    word, value = op.value.lower(), map_tensors(value, Tensor.detach)
    if axis is None:
        return value if num_replicas == 1 else all_reduce(value, word)
    sums = map_leaves(value, lambda leaf: _check_axis(leaf, axis, "reduce").sum(axis))
    counts = map_leaves(value, lambda leaf: leaf.shape[axis])
    if num_replicas > 1:
        sums, counts = all_reduce([sums, counts], "sum")
    if op is ReduceOp.SUM:
        return sums
    numbers = iter([count for _, count in flatten(counts)])
    return map_leaves(sums, lambda leaf: leaf / next(numbers))


def gather_values(value: Any, axis: int, num_replicas: int) -> Any:
    """Join each tensor over the replicas along a dim, whose size may differ between them."""
    value = map_leaves(value, lambda leaf: _check_axis(leaf, axis, "gather").detach())
    if num_replicas == 1:
        return value
    columns = zip(*([leaf for _, leaf in flatten(tree)] for tree in all_gather(value)), strict=True)
    return unflatten(value, [torch.cat(column, dim=axis) for column in columns])


def all_reduce_values(op: Any, value: Any, num_replicas: int) -> Any:
    """As ``reduce_values``; gradients flow through tensors that need one."""
    op = read_op(op)
    if num_replicas == 1:
        return value
    leaves = flatten(value)
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for _, one in leaves):
        return unflatten(value, [all_reduce_with_grad(leaf, op.value.lower()) for _, leaf in leaves])
    return all_reduce(value, op.value.lower())


def all_gather_values(value: Any, axis: int, num_replicas: int) -> Any:
    """As ``gather_values``; gradients flow through tensors that need one."""

    def join(leaf: Any) -> Any:
        if not (torch.is_grad_enabled() and leaf.requires_grad):
            return gather_values(leaf, axis, num_replicas)
        return all_gather_with_grad(leaf.movedim(axis, 0)).movedim(0, axis)

    checked = map_leaves(value, lambda leaf: _check_axis(leaf, axis, "all_gather"))
    return checked if num_replicas == 1 else map_leaves(checked, join)


def _check_axis(leaf: Any, axis: int, what: str) -> Tensor:
    if not isinstance(leaf, Tensor) or not -leaf.dim() <= axis < leaf.dim():
        shown = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:60]
        hint = "reduce elementwise with axis=None" if what == "reduce" else "x.unsqueeze(0) gives it a dim"
        raise UsageError(f"{what}(..., axis={axis}) of {shown}, which has no such dim", hint=hint)
    return leaf


def count_rows(batch: Any) -> int:
    """Return the size of dim 0 of the first tensor, array or list of plain values in a batch."""
    found = _find_rows(batch)
    if found is None:
        raise DataError(
            f"a batch of type {type(batch).__name__} has no tensor with rows",
            hint="a batch is a tensor, or a dict, list or tuple of tensors, whose dim 0 counts samples",
        )
    return found


def _find_rows(node: Any) -> int | None:
    if getattr(node, "shape", None) is not None:
        return int(node.shape[0]) if len(node.shape) else None
    if _is_column(node):
        return len(node)
    children = list(node.values()) if isinstance(node, Mapping) else node
    if not isinstance(children, (list, tuple)):
        return None
    return next((rows for rows in map(_find_rows, children) if rows is not None), None)


def cut_rows(node: Any, part: slice) -> Any:
    """Return a batch of tensors, arrays, and lists of plain values with some of its rows; what has none stays whole."""
    if getattr(node, "shape", None) is not None:
        return node[part] if len(node.shape) else node
    if _is_column(node):
        return node[part]
    if isinstance(node, Mapping):
        return {key: cut_rows(value, part) for key, value in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(cut_rows(value, part) for value in node))
    if isinstance(node, (list, tuple)):
        return type(node)(cut_rows(value, part) for value in node)
    return node


def _is_column(node: Any) -> bool:
    """Whether a list holds a plain value for each sample, as texts are collated."""
    return isinstance(node, (list, tuple)) and bool(node) and isinstance(node[0], (str, bytes, int, float))
