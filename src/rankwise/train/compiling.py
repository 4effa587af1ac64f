"""Compiles a model in place, and sees that something was compiled: torch may run a model as it is, and say nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from torch import nn

    from rankwise.runtime.context import RankContext


@final
class Compilation:
    """A model whose calls are compiled from now on, with its class, its names and its parameters as they were.

    ``torch.compile`` of a DistributedDataParallel, and ``Module.compile`` of a Sequential, compile nothing in torch 2.13: a forward that is
    torch's own code is left out, and so is all that it calls. A function of ours between the two is compiled, with what it calls.

    Args:
        model: What is compiled, inside DistributedDataParallel; its forward must not have run compiled before.
        options: Of ``torch.compile``, or True.
        ctx: The job.
    """

    def __init__(self, model: nn.Module, options: bool | Mapping[str, Any], ctx: RankContext) -> None:  # noqa: FBT001 - the config's own value
        self._ctx, self._num_graphs = ctx, _count_graphs()

        def run(*args: Any, **arguments: Any) -> Any:
            return model._call_impl(*args, **arguments)

        # What Module.compile() sets; a deep copy of the model and a pickle leave it out.
        model._compiled_call_impl = torch.compile(run, **(options if isinstance(options, Mapping) else {}))

    def check(self) -> None:
        """Tell on rank 0 if nothing was compiled; after the first forward."""
        if _count_graphs() == self._num_graphs and self._ctx.is_main:
            sys.stderr.write(
                "rankwise: warning: compile is on, and torch has compiled no part of the model: it runs as it is\n"
                "  -> look at TORCH_LOGS=graph_breaks; has torch.compiler.disable or TORCHDYNAMO_DISABLE=1 switched it off?\n"
            )


def _count_graphs() -> int:
    from torch._dynamo.utils import counters  # noqa: PLC0415 - takes a second, and only who compiles pays

    return int(counters["stats"]["unique_graphs"])
