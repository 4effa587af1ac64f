"""Linear layers of both kinds: torch's, and transformers' ``Conv1D`` of GPT-2, whose weight lies the other way, (inputs, outputs)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_conv1d(module: nn.Module | None) -> bool:
    """Whether a module is transformers' ``Conv1D``, which may not be installed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx") and hasattr(module, "nf")


def count_features(module: nn.Module | None) -> tuple[int, int] | None:
    """Return how many inputs and outputs a linear layer has; None: it is none."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (int(module.nx), int(module.nf)) if module is not None and is_conv1d(module) else None


def adapt(style: ParallelStyle | None, module: nn.Module) -> ParallelStyle | None:
    """Return the style that does to a module what another does to ``nn.Linear``."""
    is_known = is_conv1d(module) and isinstance(style, (ColwiseParallel, RowwiseParallel))
    return Conv1dStyle(style) if is_known else style


@final
class Conv1dStyle(ParallelStyle):  # type: ignore[misc]
    """What torch's style does for ``nn.Linear``, for ``Conv1D``."""

    def __init__(self, style: ColwiseParallel | RowwiseParallel) -> None:
        super().__init__()
        is_colwise = isinstance(style, ColwiseParallel)
        self._cuts = {"weight": Shard(1), "bias": Shard(0)} if is_colwise else {"weight": Shard(0)}
        self._wanted = Replicate() if is_colwise else Shard(-1)
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._cut,
            partial(_enter, self._style.input_layouts, self._wanted),
            partial(_leave, self._style.output_layouts, self._style.use_local_output),
        )

    def _cut(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for own, one in list(module.named_parameters(recurse=False)):
            # All ranks hold the same values: each cuts its own share, and nothing is sent.
            cut = distribute_tensor(one, mesh, [self._cuts.get(own, Replicate())], src_data_rank=None)
            module.register_parameter(own, nn.Parameter(cut))


def _enter(layouts: Any, wanted: Any, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
    x = inputs[0]
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, layouts, run_check=False)
    return x.redistribute(placements=[wanted])


def _leave(layouts: Any, is_local: bool, _: nn.Module, output: Any, mesh: DeviceMesh) -> Any:  # noqa: FBT001, ARG001 - torch's order
    output = output.redistribute(placements=layouts)
    return output.to_local() if is_local else output
