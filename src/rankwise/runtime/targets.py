"""What may be written in place: tensors that somebody holds, with memory of their own, and of the result's dtype."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rankwise.base.errors import CollectiveError
from rankwise.runtime.nested import describe_leaf
from rankwise.runtime.signature import format_leaf

Leaves = list[tuple[str, Any]]


def find_target_fault(leaves: Leaves, temporary: str | None, functional: str) -> CollectiveError | None:
    """Return why leaves can't be written in place, if they can't."""
    for path, leaf in leaves:
        where = path or "the value"
        if not isinstance(leaf, Tensor):
            hint = f"only tensors can be changed in place: use `new = {functional}(old)`, which takes numbers and arrays too"
            text = repr(leaf)[:60]
            return CollectiveError(f"{where} is a {type(leaf).__name__} ({text})", hint=hint)
        if leaf.requires_grad and torch.is_grad_enabled():
            return CollectiveError(
                f"{where} requires grad ({format_leaf(describe_leaf(leaf))}): overwriting it would falsify its gradient",
                hint=f"use {functional}(x.detach()), all_reduce_with_grad(x), or call under torch.no_grad()",
            )
        if any(step == 0 and length > 1 for step, length in zip(leaf.stride(), leaf.shape, strict=True)):
            return CollectiveError(
                f"{where} is expanded: several of its elements share memory",
                hint="pass x.contiguous(), kept in a variable",
            )
    if temporary is None:
        return None
    return CollectiveError(
        f"{temporary} is a temporary: nothing else holds it, so the result would be lost with it",
        hint=f"keep it in a variable first, or use `new = {functional}(...)`, which returns the result",
    )


def find_cast(leaves: Leaves, op: str) -> CollectiveError | None:
    """Return why an operation's results can't take the place of what went in, if they can't."""
    for path, leaf in leaves:
        whole = not (leaf.is_floating_point() or leaf.is_complex())
        if (op == "mean" and whole) or (op == "sum" and leaf.dtype == torch.bool):
            text = f"{path or 'the value'} is {format_leaf(describe_leaf(leaf))}, and its {op} is of another dtype"
            hint = f"it can't be put in its place: use `new = all_reduce(x, {op!r})`"
            return CollectiveError(text, hint=hint)
    return None


def find_shared(leaves: Leaves) -> tuple[list[int], bool]:
    """Return, for each tensor, the first that is the very same memory, and whether others overlap in part."""
    firsts: list[int] = []
    seen: dict[Any, int] = {}
    spans: list[tuple[str, int, int]] = []
    for index, (_, leaf) in enumerate(leaves):
        start = leaf.data_ptr()
        key = (start, leaf.shape, leaf.stride(), leaf.dtype, leaf.is_neg(), leaf.is_conj())
        firsts.append(seen.setdefault(key if leaf.numel() else index, index))
        if leaf.numel() and firsts[-1] == index:
            last = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
            spans.append((str(leaf.device), start, start + (last + 1) * leaf.element_size()))
    spans.sort()
    return firsts, any(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(spans))
