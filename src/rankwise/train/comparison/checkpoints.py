"""Compares the weights of two checkpoints, tensor by tensor; needs torch, and memory for two tensors only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch

from rankwise.checkpoint.contents import find_checkpoint, list_parts
from rankwise.checkpoint.folder import read_contents
from rankwise.checkpoint.reading import read_tensors
from rankwise.train.comparison.parameters import strip_all

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rankwise.checkpoint.contents import PartContents
    from rankwise.checkpoint.manifest import Index


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """How far a tensor of one checkpoint is from that of another.

    Attributes:
        name: As journals have it; with the checkpoint's part in front where it holds several modules.
        difference: The L2 norm of the distance over the greater of the two norms; infinite if shapes or non-finite
            values differ.
        largest: The largest distance of two elements.
        num_unequal: How many elements are not the same.
        size: How many elements there are, in the first run.
    """

    name: str
    difference: float
    largest: float
    num_unequal: int
    size: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsCompared:
    """The models in two checkpoints of one step.

    Attributes:
        step: The step.
        num_common: Tensors that both have, parameters and buffers.
        differing: Those that are not equal, the largest difference first.
        only_a: Names that only the first has.
        only_b: Names that only the second has.
    """

    step: int
    num_common: int
    differing: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare_checkpoints(step: int, a: Path, b: Path) -> CheckpointsCompared:
    """Compare all modules in two checkpoints.

    Args:
        step: Their step.
        a: The first checkpoint's own folder.
        b: The second's.

    Returns:
        What is not equal.

    Raises:
        CheckpointError: One is damaged or can't be read.
    """
    (index_a, parts_a), (index_b, parts_b) = (_open(path) for path in (a, b))
    # Of one module the names are those of its parameters, as everywhere else in the comparison.
    is_bare = len(parts_a) == len(parts_b) == 1
    names_a, names_b = (_name_tensors(parts, is_bare=is_bare) for parts in (parts_a, parts_b))
    common = [name for name in names_a if name in names_b]
    found = [_measure(name, _read(a, index_a, names_a[name]), _read(b, index_b, names_b[name])) for name in common]
    differing = [one for one in found if one.num_unequal]
    return CheckpointsCompared(
        step=step,
        num_common=len(common),
        differing=tuple(sorted(differing, key=lambda one: one.difference, reverse=True)),
        only_a=tuple(name for name in names_a if name not in names_b),
        only_b=tuple(name for name in names_b if name not in names_a),
    )


def _open(path: Path) -> tuple[Index, list[PartContents]]:
    """Return a checkpoint's index, and its modules."""
    _, index = read_contents(find_checkpoint(path))
    return index, [part for part in list_parts(index) if part.kind == "module" and part.rank is None]


def _name_tensors(parts: list[PartContents], *, is_bare: bool) -> dict[str, str]:
    """Return the names of the tensors in the index, by the names that the bare models have."""
    names = {name.removeprefix(f"{part.name}." if is_bare else ""): name for part in parts for name in part.tensors}
    return strip_all(names)


def _read(path: Path, index: Index, name: str) -> Tensor:
    return read_tensors(path, replace(index, tensors={name: index.tensors[name]}))[name]


def _measure(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    if a.shape != b.shape:
        return TensorDifference(
            name=name, difference=math.inf, largest=math.inf, num_unequal=max(a.numel(), b.numel()), size=a.numel()
        )
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    is_unequal = (a != b) & ~(a.isnan() & b.isnan())
    # Where both are infinite or NaN in the same way, they don't count: neither to the distance nor to the scale.
    distance = (a - b).abs().masked_fill(~is_unequal, 0)
    scale = max(float(one.masked_fill(~one.isfinite(), 0).norm()) for one in (a, b))
    is_finite = bool(distance.isfinite().all())
    return TensorDifference(
        name=name,
        difference=float(distance.norm()) / (scale or 1.0) if is_finite else math.inf,
        largest=(float(distance.max()) if distance.numel() else 0.0) if is_finite else math.inf,
        num_unequal=int(is_unequal.sum()),
        size=a.numel(),
    )
