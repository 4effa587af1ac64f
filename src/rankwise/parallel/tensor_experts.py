"""Split a mixture of experts over ranks that work on the same samples: each rank has some of the experts, and sees all tokens.

Such a module holds the weights of all experts in parameters whose first dim counts them, and its forward takes the tokens, which experts each one
goes to, and with what weights: `forward(hidden_states, top_k_index, top_k_weights)`, as in Mixtral, Qwen's and DeepSeek's mixtures of transformers 5.
What others have gets the weight zero on a rank, and, where the module knows of that, an index beyond its own, which costs nothing. The results are
added up.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
#: Set, all of transformers' implementations pass over an index of `num_experts`.
_KNOWS_NOBODY = "_is_expert_parallel"


def count_experts(module: nn.Module) -> int | None:
    """Return how many experts a module holds, if it can be split by them; None: it can't."""
    number, parameters = getattr(module, "num_experts", None), list(module.parameters())
    if (
        not isinstance(number, int)
        or not parameters
        or any(not one.ndim or one.shape[0] != number for one in parameters)
    ):
        return None
    return number if tuple(inspect.signature(module.forward).parameters) == _ARGUMENTS else None


def skip_experts(model: nn.Module) -> None:
    """Let a model run without values: which expert gets a token is a value."""
    for module in model.modules():
        if count_experts(module) is not None:
            module.forward = _skip


def _skip(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:  # noqa: ARG001 - the experts' own
    return hidden_states * top_k_weights.sum()


@final
class ExpertsParallel(ParallelStyle):  # type: ignore[misc]
    """Each rank has some of the experts of a module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, _cut)
        module.num_experts = int(module.num_experts) // device_mesh.size()
        if hasattr(module, _KNOWS_NOBODY):
            setattr(module, _KNOWS_NOBODY, True)
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
    nobody = number if hasattr(module, _KNOWS_NOBODY) else 0
    # What other ranks do with a token has its share in the gradients of what they all were given.
    tokens, weights = (
        DTensor.from_local(one, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        for one in (tokens, weights)
    )
    return (tokens, own.where(is_own, nobody), weights * is_own), {}


def _leave(mesh: DeviceMesh, module: nn.Module, _: Any, output: Tensor | None) -> Tensor | None:
    for name, _one in module.named_parameters(recurse=False):
        vars(module).pop(name, None)
    if output is None:  # the forward has raised
        return None
    whole = DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local()
