"""Where the stages of a pipeline begin, so that the slowest is as fast as can be: by what each block was measured to take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.base.errors import RankwiseError, UsageError
from rankwise.parallel.costs import measure_costs
from rankwise.parallel.cuts import balance

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.parallel.pipeline_layout import Layout
    from rankwise.runtime.context import RankContext


def find_balanced(
    model: nn.Module,
    layout: Layout,
    num_stages: int,
    example: Any,
    loss: Callable[[Any, Any], Any] | None,
    ctx: RankContext,
) -> list[int]:
    """Measure a model's blocks on rank 0; return with which block each stage begins, and at the end their number.

    What stands before the blocks counts for the first stage, what stands behind them for the last.

    Args:
        model: The whole; afterwards as it was.
        layout: Its blocks.
        num_stages: How many stages.
        example: A micro-batch, as ``loss`` takes it; without a loss what the model is called with.
        loss: As for ``apply_pipeline``.
        ctx: The job.

    Raises:
        RankwiseError: The model can't be measured with it; the same on every rank.

    Collective: every rank.
    """
    word: Any = None
    if ctx.is_main:
        try:
            word = _measure(model, layout, num_stages, example, loss)
        except RankwiseError as error:
            word = (error.message, error.hint)
    told = ctx.control.exchange(word, what="apply_pipeline (rank 0 measures the blocks)")[0]
    if isinstance(told, tuple):
        raise UsageError(told[0], rank=0, hint=told[1])
    return list(told)


def _measure(
    model: nn.Module, layout: Layout, num_stages: int, example: Any, loss: Callable[[Any, Any], Any] | None
) -> list[int]:
    def take_loss(model: nn.Module, batch: Any) -> Any:
        assert loss is not None  # noqa: S101 - else this is not used
        value = loss(model, batch)
        value = value["loss"] if isinstance(value, dict) else value
        return value[0] if isinstance(value, tuple) else value

    blocks = list(layout.blocks)
    costs = dict.fromkeys(blocks, 0.0)
    for unit in measure_costs(model, example, loss=None if loss is None else take_loss, blocks=blocks):
        path = unit.name
        while path and path not in costs:
            path = path.rpartition(".")[0]
        is_behind = any(f"{unit.name}.".startswith(f"{name}.") for name in layout.behind)
        costs[path or (blocks[-1] if is_behind else blocks[0])] += unit.time
    return [*balance(list(costs.values()), num_stages), len(blocks)]
