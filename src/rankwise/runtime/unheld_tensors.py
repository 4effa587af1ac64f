"""Notice a tensor that nobody else holds: what a collective writes into it is lost at once."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rankwise.runtime.eager import is_called_compiled, outside_graphs
from rankwise.runtime.nested import list_children

# torch has no public count of who shares a storage; without this one, nothing is ever called a temporary.
_count_storage_users = getattr(torch._C, "_storage_Use_Count", None)

#: Deeper than this, a container holds itself.
_MAX_DEPTH = 100


@outside_graphs
def find_temporary(tree: Any) -> str | None:
    """Return the path of a tensor that ends with the call that it was made for; None if there is none, or no telling.

    ``all_reduce_(torch.tensor(v))`` and ``all_reduce_([x.to(device)])`` on another device are such calls. A view of a
    living tensor is none, nor a gradient, a NumPy array's memory, or ``x.to(device)`` that gave ``x`` itself.
    Arguments that arrive by ``*args`` or ``**kwargs`` are held by that tuple, and pass.

    Args:
        tree: The argument of a function that was called by the user; it must call us itself.
    """
    # Whoever watches or rewrites frames holds references of their own.
    if is_called_compiled() or sys.gettrace() or sys.getprofile() or (counts := _calibrate()) is None:
        return None
    holders = sys.getrefcount(tree)  # first: an argument that waits for its call is held as well
    found = _find(tree, "", holders - counts[0], 0)
    if found is not None and _calibrate.__wrapped__() != counts:
        # What was counted first had been counted in another state: under a tracer, or in compiled frames.
        _calibrate.cache_clear()
        return None
    return found


def _find(node: Any, path: str, extra_holders: int, depth: int) -> str | None:
    if extra_holders > 0 or depth > _MAX_DEPTH:
        return None
    if isinstance(node, Tensor):
        return path or "the tensor" if _is_alone(node) else None
    expected = _calibrate()
    # Counted first: the list of children is a holder too.
    counts = _count_children(node)
    for (step, child), holders in zip(list_children(node) or [], counts, strict=True):
        found = _find(child, path + step, holders - (expected[1] if expected else 0), depth + 1)
        if found is not None:
            return found
    return None


def _count_children(node: Any) -> list[int]:
    """Return sys.getrefcount of each child of a container, in the order of ``list_children``."""
    children = [child for _, child in list_children(node) or []]
    return [sys.getrefcount(child) for child in children]


def _is_alone(tensor: Tensor) -> bool:
    """Whether neither C++ (a parameter holding its gradient) nor another tensor nor NumPy shares what it holds."""
    counts = _calibrate_tensor()
    if counts is None or not tensor.untyped_storage().resizable():
        return False
    users = _count_users(tensor)
    return users[0] <= counts[0] and users[1] <= counts[1]


def _count_users(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    assert _count_storage_users is not None  # noqa: S101 - asked before
    return tensor._use_count(), _count_storage_users(storage._cdata)


@cache
def _calibrate() -> tuple[int, int] | None:
    """Return the reference counts of a temporary argument, and of a child that only its temporary container holds.

    CPython 3.14 lends references: a living local variable then looks the same as a temporary, and we can't tell.
    """
    living, living_list = torch.empty(1), [torch.empty(1)]
    alone, held = _probe(torch.empty(1)), _probe(living)
    inside, inside_held = _count_children([torch.empty(1)])[0], _count_children([living])[0]
    is_told = held > alone and inside_held > inside and _count_children(living_list)[0] == inside
    return (alone, inside) if is_told and _calibrate_tensor() is not None else None


def _probe(tree: Any) -> int:
    """Stand between the user and ``find_temporary``, as its callers do."""
    return _probe_inside(tree)


def _probe_inside(tree: Any) -> int:
    return sys.getrefcount(tree)


@cache
def _calibrate_tensor() -> tuple[int, int] | None:
    """Return how many users a tensor and its storage have when there is one only; None if this torch does not tell."""
    if _count_storage_users is None or not hasattr(Tensor, "_use_count"):
        return None
    alone = _count_users(torch.empty(1))
    shared = torch.empty(1)
    alias = shared.detach()
    with_alias, owner = _count_users(shared), torch.empty(1, requires_grad=True)
    owner.grad = torch.empty(1)
    of_grad = _count_users(owner.grad)
    return alone if with_alias[1] > alone[1] and of_grad[0] > alone[0] and alias.shape else None
