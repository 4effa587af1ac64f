"""Compiles a model in place, and sees that something was compiled: torch may run a model as it is, and say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.log import get_logger
from rankwise.parallel.strategy import list_innermost

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType

    from torch import nn

    from rankwise.runtime.context import RankContext

_LOGGER = get_logger(__name__)


@final
class Compilation:
    """A model whose calls are compiled from now on, with its class, its names and its parameters as they were.

    ``torch.compile`` of a DistributedDataParallel, and ``Module.compile`` of a Sequential, compile nothing in torch
    2.13: a forward that is torch's own code is left out, and so is all that it calls. A function of ours between the
    two is compiled, with what it calls.

    Args:
        model: What is compiled, inside DistributedDataParallel; its forward must not have run compiled before.
        options: Of ``torch.compile``, or True.
        ctx: The job.
    """

    def __init__(self, model: nn.Module, options: bool | Mapping[str, Any], ctx: RankContext) -> None:  # noqa: FBT001 - the config's own value
        self._ctx, self._num_graphs = ctx, _count_graphs()

        chosen = options if isinstance(options, Mapping) else {}
        blocks = list_innermost(model)
        if blocks:
            # FSDP2's hooks gather and can't be compiled: what runs between them is (torchtitan compiles each block as
            # well).
            _compile_blocks(blocks, chosen)
            return

        def run(*args: Any, **arguments: Any) -> Any:
            return model._call_impl(*args, **arguments)

        # What Module.compile() sets; a deep copy of the model and a pickle leave it out.
        model._compiled_call_impl = torch.compile(run, **chosen)

    def check(self) -> None:
        """Tell on rank 0 if nothing was compiled; after the first forward."""
        if _count_graphs() == self._num_graphs and self._ctx.is_main:
            _LOGGER.warning(
                "compile is on, and torch has compiled no part of the model: it runs as it is\n"
                "  -> look at TORCH_LOGS=graph_breaks; has torch.compiler.disable or TORCHDYNAMO_DISABLE=1 switched it off?"
            )


def _compile_blocks(blocks: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile what each block computes; blocks of one class and size share their graphs, and no others count against Dynamo's limit."""
    codes: dict[object, CodeType] = {}
    for block in blocks:
        forward = block.forward

        def run(*args: Any, _forward: Any = forward, **arguments: Any) -> Any:
            return _forward(*args, **arguments)

        kind = (type(block), tuple(one.shape for one in block.parameters()))
        # Dynamo keeps its graphs with the code.
        run.__code__ = codes.setdefault(kind, run.__code__.replace())
        block.forward = torch.compile(run, **options)


def _count_graphs() -> int:
    from torch._dynamo.utils import counters  # noqa: PLC0415 - takes a second, and only who compiles pays

    return int(counters["stats"]["unique_graphs"])
