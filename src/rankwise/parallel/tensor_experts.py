"""Split a mixture of experts over ranks that work on the same samples: each rank has some of the experts, and sees all tokens.

Such a module holds the weights of all experts in parameters whose first dim counts them, and its forward takes the tokens, which experts each one
goes to, and with what weights: `forward(hidden_states, top_k_index, top_k_weights)`, as in Mixtral, Qwen's and DeepSeek's mixtures of transformers 5.
A token that belongs to an expert of another rank gets the weight zero on this one. Where the module passes over an index beyond its own, it gets that,
too; elsewhere it goes through one of this rank's experts for nothing. The results are added up.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: GPT-OSS has the same by other names.
_ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
#: Set, transformers' implementations pass over an index of `num_experts`, but for the eager one of GPT-OSS.
_TAKES_SENTINEL = "_is_expert_parallel"
_GIVEN = "_rankwise_given"


def count_experts(module: nn.Module) -> int | None:
    """Return how many experts a module holds, if it can be split by them; None: it can't."""
    number, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if (
        not isinstance(number, int)
        or not parameters
        or any(True for child in module.children() for _ in child.parameters())
        or any(not one.ndim or one.shape[0] != number for one in parameters)
    ):
        return None
    return number if _read_arguments(module) in _ARGUMENTS else None


def _read_arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def route_evenly(model: nn.Module) -> None:
    """Let a model run without values: which expert gets a token is one. Each gets as many, and what that computes has the right sizes only."""
    for module in model.modules():
        if count_experts(module) is not None:
            module.forward = partial(_route_evenly, module, inspect.signature(module.forward))


def _route_evenly(module: nn.Module, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Tensor:
    hidden_states, top_k_index, top_k_weights = signature.bind(*args, **kwargs).args
    number = int(module.num_experts)
    rows = torch.zeros(number * -(-top_k_index.numel() // number), dtype=torch.int64, device=hidden_states.device)
    x = hidden_states[rows].view(number, -1, hidden_states.shape[-1])
    for weight in (one for one in module.parameters() if one.ndim == 3):
        # As in nn.Linear, or the other way; after gate and up side by side.
        for last, turned in ((weight.shape[2], weight.transpose(1, 2)), (weight.shape[1], weight)):
            if x.shape[-1] == 2 * last:
                gate, up = x.chunk(2, -1)
                x = nn.functional.silu(gate) * up
            if x.shape[-1] == last:
                x = x @ turned
                break
    each = x.flatten(0, 1)[: top_k_index.numel()] * top_k_weights.reshape(-1, 1)
    total = each.view(*top_k_index.shape, -1).sum(-2).to(hidden_states.dtype)
    return total if total.shape == hidden_states.shape else hidden_states * top_k_weights.sum().to(hidden_states.dtype)


@final
class ExpertsParallel(ParallelStyle):  # type: ignore[misc]
    """Each rank has some of the experts of a module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, _cut)
        module.num_experts = int(module.num_experts) // device_mesh.size()
        if hasattr(module, _TAKES_SENTINEL):
            setattr(module, _TAKES_SENTINEL, True)
        module.register_forward_pre_hook(partial(_enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(partial(_leave, device_mesh), always_call=True)
        return module


def _cut(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, one in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(cut, requires_grad=one.requires_grad))


def _enter(
    mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tokens, index, weights = inspect.signature(module.forward).bind(*args, **kwargs).args
    # Seen before the parameters by who asks for them: the forward computes with plain tensors.
    vars(module).update({name: one.to_local() for name, one in module.named_parameters(recurse=False)})
    number = int(module.num_experts)
    own = index - mesh.get_local_rank() * number
    is_own = (own >= 0) & (own < number)
    sentinel = number if hasattr(module, _TAKES_SENTINEL) and _read_arguments(module) == _ARGUMENTS[0] else 0
    # What other ranks do with a token has its share in the gradients of what they all were given.
    tokens, weights = (
        DTensor.from_local(one, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        for one in (tokens, weights)
    )
    vars(module)[_GIVEN] = tokens, weights
    return (tokens, own.where(is_own, sentinel), weights * is_own), {}


def _leave(mesh: DeviceMesh, module: nn.Module, _: Any, output: Tensor | None) -> Tensor | None:
    given = [
        *vars(module).pop(_GIVEN, ()),
        *(vars(module).pop(name, None) for name, _ in module.named_parameters(recurse=False)),
    ]
    if output is None:  # the forward has raised
        return None
    if torch.is_grad_enabled() and not output.requires_grad:
        # No token came to this rank: gradients of zero, as what the ranks were given has its gradients added up.
        output = output + sum(one.flatten()[:0].sum().to(output.dtype) for one in given)
    whole = DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local()
