"""Learning rates that run ahead, or differ between ranks."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import all_once, node_in, text_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Spread
from rankwise.lint.paths.phrases import written
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.script import Script

#: Where schedules take how many steps they are planned for.
_STEPS = {"CosineAnnealingLR": (1, "T_max"), "OneCycleLR": (2, "total_steps"), "LinearLR": (3, "total_iters"), "PolynomialLR": (1, "total_iters"),
          **dict.fromkeys(("get_linear_schedule_with_warmup", "get_cosine_schedule_with_warmup", "get_polynomial_decay_schedule_with_warmup"), (2, "num_training_steps")),
          "get_scheduler": (3, "num_training_steps")}  # fmt: skip
_PREPARES = ("accelerate.Accelerator.prepare", "accelerate.Accelerator.prepare_scheduler")


@rule("RW615", "warning", "M7", "a prepared scheduler was planned for the steps of one process")
def prepared_scheduler_runs_ahead(script: Script) -> Iterator[Found]:
    makers = [call for call in script.all_calls if call.name == "accelerate.Accelerator"]
    if any({"split_batches", "step_scheduler_with_optimizer"} & call.kwargs.keys() for call in makers):
        return
    prepared = {
        value.made.node
        for call in script.all_calls
        if call.name in _PREPARES
        for value in call.args
        if value.made is not None
    }
    for place in all_once(script):
        at = _STEPS.get(place.last.name.rpartition(".")[2].lstrip("?"))
        steps = place.last.arg(*at) if at is not None else None
        if at is None or steps is None or place.last.node not in prepared:
            continue
        loops = (loop for _, loop in place.entry.histories[0].loops if isinstance(loop.node, ast.While))
        bounds = {one.path for loop in loops if loop.value.made is not None for one in loop.value.made.args}
        is_bound = steps.path != "" and steps.path in bounds  # the loop counts steps of the optimizer
        if ("prepared" in steps.origin or is_bound) and "world_size" not in steps.origin:
            text = text_of(place.last.arg_node(*at))
            yield Found(
                place.last.arg_node(*at) or place.last.node,
                f"`{text}` counts {'optimizer steps' if is_bound else 'the steps of one process'}, but a prepared scheduler makes num_processes steps at each step(): it ends early",
                f"pass {text} * accelerator.num_processes",
            )


_STEP = "torch.optim.lr_scheduler.ReduceLROnPlateau.step"


@rule("RW616", "error", "M4", "the learning rate depends on a metric that only this rank has measured")
def schedule_of_one_rank(script: Script) -> Iterator[Found]:
    if not script.has_init:
        return
    for call in (place.last for place in all_once(script, anywhere=True) if place.last.name == _STEP):
        metric, node = call.arg(0, "metrics"), node_in(script, call)
        if node is not None and metric is not None and metric.spread is Spread.LOCAL and not call.guards:
            text = written(call.arg_node(0, "metrics"))
            yield Found(
                node,
                f"`{text}` comes from this rank's own data: ranks lower their learning rates at different steps, and the replicas diverge",
                f"average `{text}` over all ranks (all_reduce) before the scheduler gets it",
            )
