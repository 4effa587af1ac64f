"""Models and batches without values: fake tensors, which have shapes and storages, but no memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankwise.base.errors import ModelError, RankwiseError
from rankwise.parallel.dtensors import to_local

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._subclasses.fake_tensor import FakeTensorMode


def cast(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a precision gives a tensor: integers stay, and so does float64 where nothing narrower is asked for."""
    if to is None or not dtype.is_floating_point or (dtype == torch.float64 and to == torch.float32):
        return dtype
    return to


def list_held(model: nn.Module) -> list[Tensor]:
    """Return all tensors of a model: parameters, buffers, and attributes of its modules."""
    attributes = (one for module in model.modules() for one in vars(module).values())
    return [*model.parameters(), *model.buffers(), *(one for one in attributes if isinstance(one, Tensor))]


def make_fakes(model: nn.Module, mode: FakeTensorMode, memo: dict[int, Any], *, dtype: torch.dtype | None = None, device: Any = "cpu") -> None:  # fmt: skip
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
