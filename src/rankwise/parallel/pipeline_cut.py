"""Where the stages of a pipeline begin; with an example, so that the slowest is as fast as can be, by what each block was measured to take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.base.errors import RankwiseError, UsageError
from rankwise.parallel.costs import measure_costs
from rankwise.parallel.names import find_owner
from rankwise.parallel.partition import balance
from rankwise.parallel.pipeline_batches import ask
from rankwise.parallel.pipeline_layout import Calls, Deal, Layout, deal, find_layout, list_bounds
from rankwise.parallel.pipeline_plan import Shapes
from rankwise.parallel.pipeline_trace import find_calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.parallel.blocks import Blocks
    from rankwise.runtime.context import RankContext

    Loss = Callable[[Any, Any], Any] | None


def cut_model(
    model: nn.Module, ctx: RankContext, num_stages: int, *, blocks: Blocks, cut: Any, example: Any, loss: Loss
) -> tuple[Layout, Shapes, Deal, list[int]]:
    """Find where the stages begin, and what each has: by an example, of which rank 0 follows the forward and measures the blocks.

    Raises:
        UsageError: It can't be cut so, followed or measured; the same on every rank.

    Collective: every rank, if there is an example.
    """
    layout = find_layout(model, blocks, least=num_stages, rank=ctx.rank)
    shapes = Shapes(model, layout, ctx.device)
    calls = None
    if example is not None:
        calls = _ask_main(ctx, lambda: _follow(model, shapes, example, loss), "rank 0 follows the forward")
        layout = layout.follow(calls)
    bounds = list_bounds(layout.blocks, num_stages, cut, rank=ctx.rank)
    if cut is None and example is not None:
        bounds = _ask_main(ctx, lambda: _measure(model, layout, num_stages, example, loss), "rank 0 measures the blocks")  # fmt: skip
    return layout, shapes, deal(model, layout, bounds, calls), bounds


def _ask_main(ctx: RankContext, work: Callable[[], Any], what: str) -> Any:
    """Return what rank 0 has found out, on every rank; or raise its error."""
    word: Any = None
    if ctx.is_main:
        try:
            word = "found", work()
        except RankwiseError as error:
            word = "failed", error.message, error.hint
    kind, *details = ctx.control.exchange(word, what=f"apply_pipeline ({what})")[0]
    if kind == "failed":
        raise UsageError(details[0], rank=0, hint=details[1])
    return details[0]


def _follow(model: nn.Module, shapes: Shapes, example: Any, loss: Loss) -> Calls:
    """Return what the forward of a model calls, in order."""
    if loss is None:
        args, kwargs = (example, {}) if isinstance(example, tuple) else ((), example) if isinstance(example, dict) else ((example,), {})  # fmt: skip
    else:
        (args, kwargs), _ = ask(model, example, loss)
    return find_calls(shapes.trace(args, kwargs, training=True)[0])


def _measure(model: nn.Module, layout: Layout, num_stages: int, example: Any, loss: Loss) -> list[int]:
    """Return with which block each stage begins, and at the end their number; what stands around the blocks counts with the one before it."""

    def take_loss(model: nn.Module, batch: Any) -> Any:
        assert loss is not None  # noqa: S101 - else this is not used
        value = loss(model, batch)
        value = value["loss"] if isinstance(value, dict) else value
        return value[0] if isinstance(value, tuple) else value

    blocks = list(layout.blocks)
    costs = dict.fromkeys(blocks, 0.0)
    for unit in measure_costs(model, example, loss=None if loss is None else take_loss, blocks=blocks):
        around = find_owner(unit.name, layout.around)
        number = 0 if around is None else layout.around[around]
        costs[find_owner(unit.name, costs) or blocks[max(number, 1) - 1]] += unit.time
    return [*balance(list(costs.values()), num_stages), len(blocks)]
