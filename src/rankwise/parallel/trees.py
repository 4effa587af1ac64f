"""Tensors without their values, and nested containers without their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


@final
@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_grad: bool = False


def form_of(tensor: Tensor) -> Form:
    """Return a tensor's form."""
    return Form(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    return [leaf for _, leaf in flatten(tree) if isinstance(leaf, Tensor)]


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested containers with each tensor replaced by what ``change`` makes of it."""
    return unflatten(tree, [change(leaf) if isinstance(leaf, Tensor) else leaf for _, leaf in flatten(tree)])


def describe(tree: Any) -> list[str]:
    """Return the leaves of a batch as text: tensors by form."""
    return [f"{path} {tuple(one.shape)} {one.dtype}" if isinstance(one, Tensor) else f"{path} {one!r}" for path, one in flatten(tree)]  # fmt: skip


@final
class Slot:
    """Where a tensor stands in a tree; no dataclass, which would be taken apart like a container."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Slot({self.number})"


def take_tensors(tree: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Return a tree with a slot in the place of each tensor, and the tensors."""
    if isinstance(tree, Tensor):  # what most models return
        return Slot(0), (tree,)
    leaves = [leaf for _, leaf in flatten(tree)]
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    slots = iter(map(Slot, range(len(tensors))))
    return unflatten(tree, [next(slots) if isinstance(one, Tensor) else one for one in leaves]), tuple(
        tensors
    )


def put_tensors(tree: Any, tensors: Sequence[Any]) -> Any:
    """Return a tree with tensors in its slots."""
    if isinstance(tree, Slot):
        return tensors[tree.number]
    leaves = [leaf for _, leaf in flatten(tree)]
    return unflatten(tree, [tensors[one.number] if isinstance(one, Slot) else one for one in leaves])
