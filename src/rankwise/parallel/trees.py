"""Tensors and models without their values, which have shapes and storages, but no memory; and nested containers without their tensors."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from rankwise.base.errors import ModelError, RankwiseError
from rankwise.parallel.dtensors import to_local
from rankwise.runtime.nested import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode


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
    return [
        f"{path} {tuple(one.shape)} {one.dtype}" if isinstance(one, Tensor) else f"{path} {one!r}"
        for path, one in flatten(tree)
    ]


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
    return unflatten(tree, [next(slots) if isinstance(one, Tensor) else one for one in leaves]), tuple(tensors)


def put_tensors(tree: Any, tensors: Sequence[Any]) -> Any:
    """Return a tree with tensors in its slots."""
    if isinstance(tree, Slot):
        return tensors[tree.number]
    leaves = [leaf for _, leaf in flatten(tree)]
    return unflatten(tree, [tensors[one.number] if isinstance(one, Slot) else one for one in leaves])


def cast(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a precision gives a tensor: integers stay, and so does float64 where nothing narrower is asked for."""
    if to is None or not dtype.is_floating_point or (dtype == torch.float64 and to == torch.float32):
        return dtype
    return to


def list_held(model: nn.Module) -> list[Tensor]:
    """Return all tensors of a model: parameters, buffers, and attributes of its modules."""
    attributes = (one for module in model.modules() for one in vars(module).values())
    return [*model.parameters(), *model.buffers(), *(one for one in attributes if isinstance(one, Tensor))]


def make_fakes(
    model: nn.Module,
    mode: FakeTensorMode,
    memo: dict[int, Any],
    *,
    dtype: torch.dtype | None = None,
    device: Any = "cpu",
) -> None:
    """Put a fake into a memo for each tensor of a model that is not in it, of split layers for this rank's part: ``copy.deepcopy`` finds it there.

    ``dtype`` is that of floating-point tensors, None their own; ``device`` is where the fakes say they are.
    """
    held = list_held(model)
    with mode:
        for one, local in zip(held, to_local(held), strict=True):
            if id(one) not in memo:
                kind = cast(one.dtype, dtype)
                fake = torch.empty_strided(local.shape, local.stride(), dtype=kind, device=device)
                is_parameter = isinstance(one, nn.Parameter)
                memo[id(one)] = nn.Parameter(fake, one.requires_grad) if is_parameter else fake


@contextmanager
def following_forward(way_out: str) -> Iterator[None]:
    """Raise a ModelError where a user's forward can't run on fakes, whatever it has raised."""
    try:
        yield
    except RankwiseError:
        raise
    except Exception as error:
        raise ModelError(
            f"the forward pass can't be followed without values: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            hint=f"is the batch what the model is called with? A model that looks at values can't be {way_out}",
        ) from error
