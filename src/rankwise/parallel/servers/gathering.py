"""The servers' states as those of a plain optimizer over the whole model: what a checkpoint is made of."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from rankwise.parallel.servers.layout import ShardLayout


def gather_states(
    model: nn.Module,
    layouts: Sequence[ShardLayout],
    packed: Mapping[int, Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Fill a model with the servers' values, and return an optimizer over its trained parameters that has their states."""
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = make_optimizer(list(parameters.values()))
    gathered: dict[str, dict[str, Any]] = {}
    with torch.no_grad():
        for layout in layouts:
            loaded = torch.load(io.BytesIO(packed[layout.number].numpy().tobytes()), weights_only=True)
            states = loaded["optimizer"].get("state", {})
            for place, (piece, value) in enumerate(zip(layout.pieces, loaded["values"], strict=True)):
                whole = parameters[piece.name]
                _write(whole.data, value, piece.start)
                held = gathered.setdefault(piece.name, {})
                for key, part in states.get(place, {}).items():
                    if not isinstance(part, torch.Tensor) or part.shape != value.shape or part.dim() == 0:
                        held[key] = part
                        continue
                    if key not in held:
                        held[key] = torch.zeros(whole.shape, dtype=part.dtype, device=whole.device)
                    _write(held[key], part, piece.start)
    for name, state in gathered.items():
        if state:
            optimizer.state[parameters[name]] = state
    return optimizer


def _write(whole: Tensor, part: Tensor, start: int) -> None:
    flat = whole.contiguous().view(-1)
    flat[start : start + part.numel()] = part.reshape(-1).to(flat.device)
    if not whole.is_contiguous():
        whole.copy_(flat.view(whole.shape))


def name_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Mapping[str, Any]]:
    """Return what a plain optimizer keeps for each parameter of a model, by name."""
    names = {one: name for name, one in model.named_parameters()}
    strangers = [one for group in optimizer.param_groups for one in group["params"] if one not in names]
    if strangers:
        raise UsageError(
            f"resume: the optimizer has {len(strangers)} parameters that the model does not have",
            hint="pass the optimizer of this model that the checkpoint was loaded into",
        )
    return {names[one]: state for one, state in optimizer.state.items()}
