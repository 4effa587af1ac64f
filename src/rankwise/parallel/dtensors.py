"""Tensors that are spread over several meshes, or not at all: their norm, and optimizers that take them together.

torch's functions on lists of tensors (torch 2.8 to 2.13: ``clip_grad_norm_``, ``foreach`` optimizers) take those of one mesh only: a model of which
some parameters are cut by the tensor axis and the others are not has two kinds, and ends with "must have the same mesh".
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rankwise.runtime.control import Control


def to_local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each, which shares its memory."""
    return [one.to_local() if isinstance(one, DTensor) else one for one in tensors]


def share_states(
    own: Mapping[Any, dict[str, Any]], extra: Any, control: Control, *, what: str
) -> tuple[dict[Any, dict[str, Any]], list[Any]]:
    """Return the optimizer states of all ranks' parameters, with tensors on the meta device for what others have; and what each adds.

    Collective: every rank.
    """
    forms = {key: {name: to_meta(value) for name, value in state.items()} for key, state in own.items()}
    answers = control.exchange((forms, extra), what=what)
    others = {key: state for held, _ in answers for key, state in held.items()}
    return {**others, **own}, [added for _, added in answers]


def to_meta(value: Any) -> Any:
    """Return a tensor of the same shape and dtype without values, as of one that another rank has; what is no tensor stays."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value


def add_up(tensor: Tensor) -> Tensor:
    """Return a tensor whose parts are added up: DTensor may leave that to whoever reads it.

    Collective: every rank of its mesh, if it is partial.
    """
    if not isinstance(tensor, DTensor) or not any(one.is_partial() for one in tensor.placements):
        return tensor
    wanted = [Replicate() if one.is_partial() else one for one in tensor.placements]
    return tensor.redistribute(placements=wanted)


def group_by_layout(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups that torch's functions on lists take: plain ones of one device and dtype, and those of one mesh and placement."""
    groups: dict[object, list[Tensor]] = {}
    for one in tensors:
        layout = (id(one.device_mesh), one.placements) if isinstance(one, DTensor) else (one.device, one.dtype)
        groups.setdefault(layout, []).append(one)
    return list(groups.values())


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm, a plain scalar, of all elements of plain tensors, which are equal on all ranks, and of DTensors of any mesh.

    Collective: every rank of the meshes, if there are DTensors.
    """
    if not tensors:
        return torch.zeros(())
    norms = [_find_norm(group) for group in group_by_layout(map(add_up, tensors))]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([one.to(norms[0].device, norms[0].dtype) for one in norms]))


def scale_to(tensors: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale tensors, in place, so that their norm is at most ``max_norm``: as ``torch.nn.utils.clip_grads_with_norm_`` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in group_by_layout(to_local(tensors)):
        scale = factor.to(group[0].device)
        if group[0].is_cuda:
            torch._foreach_mul_(group, scale)
        else:  # no faster there, and not every kind of tensor knows functions on lists
            for one in group:
                one.mul_(scale)


def _find_norm(group: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors of one layout; not by DTensor's own, which warns of every second axis."""
    first = group[0]
    norm: Tensor = torch.nn.utils.get_total_norm(to_local(group))
    placements = first.placements if isinstance(first, DTensor) else ()
    if all(one.is_replicate() for one in placements):
        return norm
    square = norm.square()
    for dim, one in enumerate(placements):
        if not one.is_replicate():
            dist.all_reduce(square, group=first.device_mesh.get_group(dim))
    return square.sqrt()


class ShardedScaler(torch.amp.GradScaler):  # type: ignore[misc]
    """A GradScaler of gradients of several layouts, which torch's own refuses; what overflows on one rank is skipped on all."""

    def __init__(self, device_type: str, group: dist.ProcessGroup) -> None:
        super().__init__(device_type)
        self._group = group

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: ARG002, FBT001 - torch's signature
    ) -> dict[torch.device, Tensor]:
        held = (one.grad for group in optimizer.param_groups for one in group["params"])
        found = found_inf.clone()
        for gradients in group_by_layout(to_local(add_up(one) for one in held if one is not None)):
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv_scale.to(found.device))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return {found.device: found}


#: Parameters in whose place their model has others.
_replaced = WeakTensorKeyDictionary()


@contextmanager
def noting_replaced(model: nn.Module) -> Iterator[None]:
    """Let an optimizer that holds a parameter which is replaced in this block raise at its first step."""
    let_optimizers_mix()
    before = list(model.parameters())
    yield
    kept = {id(one) for one in model.parameters()}
    _replaced.update({one: True for one in before if id(one) not in kept})


#: Those that have been looked at before their first step.
_seen: WeakSet[torch.optim.Optimizer] = WeakSet()


@cache
def let_optimizers_mix() -> None:
    """Let each optimizer of this process go through its parameters one by one, if they are of several layouts.

    On GPUs torch takes its functions on lists by default. What the user has chosen does not count: it could not work.
    """
    register_optimizer_step_pre_hook(_choose_loop)


def _choose_loop(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _seen:
        return
    held = [one for group in optimizer.param_groups for one in group["params"]]
    stale = sum(one in _replaced for one in held)
    if stale:
        raise UsageError(
            f"the optimizer holds {stale} parameters that sharding or splitting the model has replaced: its steps would change nothing",
            hint="build the optimizer afterwards: apply_fsdp(model), then AdamW(model.parameters())",
        )
    _seen.add(optimizer)
    for group in optimizer.param_groups:
        if len(group_by_layout(group["params"])) > 1:
            group.update({name: False for name in ("foreach", "fused") if name in group})
