"""Learning rates that run ahead, or differ between ranks."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.model.values import Spread
from rankwise.lint.paths.words import written
from rankwise.lint.rule import rule
from rankwise.lint.topics.job_view import line_of, once, places, text_of
from rankwise.lint.topics.option_text import sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Script

_STEPS = frozenset({"num_training_steps", "T_max", "total_steps", "total_iters", "max_steps"})
_POSITIONS = {"CosineAnnealingLR": 1, "OneCycleLR": 2, "LinearLR": 3, "PolynomialLR": 1, "get_linear_schedule_with_warmup": 2,
              "get_cosine_schedule_with_warmup": 2, "get_polynomial_decay_schedule_with_warmup": 2, "get_scheduler": 3}  # fmt: skip
_AWARE = ("num_processes", "world_size", "split_batches", "step_scheduler_with_optimizer", "num_update_steps")


@rule("RW615", "warning", "M7", "a prepared scheduler was planned for the steps of one process")
def prepared_scheduler_runs_ahead(script: Script) -> Iterator[Found]:
    if "prepare" not in script.piece.code or any(word in script.piece.code for word in _AWARE):
        return
    prepared = [
        place.last
        for place in once(
            places(script, "accelerate.Accelerator.prepare", "accelerate.Accelerator.prepare_scheduler")
        )
    ]
    for place in once(places(script)):
        call = place.last
        steps = _steps_of(call)
        if steps is None or not _is_prepared(script, call, prepared):
            continue
        before = [one for one in prepared if one.index < call.index]
        measured = _measures(script, steps, before)
        counted = _is_loop_bound(script, steps)
        if measured or counted:
            what = "the steps of one process" if measured else "optimizer steps"
            yield Found(
                steps if isinstance(steps, ast.expr) else call.node,
                f"`{text_of(steps)}` counts {what}, but a prepared scheduler makes num_processes steps at each step(): it ends early",
                f"pass {text_of(steps)} * accelerator.num_processes",
            )


def _steps_of(call: Call) -> ast.AST | None:
    last = call.name.rpartition(".")[2].lstrip("?")
    if last not in _POSITIONS:
        return None
    return next(
        (node for name in _STEPS if (node := call.arg_node(None, name)) is not None),
        call.arg_node(_POSITIONS[last]),
    )


def _is_prepared(script: Script, call: Call, prepared: list[Call]) -> bool:
    names = [
        target.id
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and node.value is call.node
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    return any(
        arg is call.node or (isinstance(arg, ast.Name) and arg.id in names)
        for one in prepared
        if one.index > call.index
        for arg in getattr(one.node, "args", ())
    )


def _measures(script: Script, steps: ast.AST, before: list[Call]) -> bool:
    """Whether it is the length of a loader that was prepared by then."""
    lines = [line_of(one) for one in before]
    names = {arg.id for one in before for arg in getattr(one.node, "args", ()) if isinstance(arg, ast.Name)}
    measured = [
        part
        for source in sources(script.tree, steps)
        for part in ast.walk(source)
        if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "len" and part.args
    ]
    return bool(lines) and any(
        getattr(part.args[0], "id", "") in names and part.lineno > min(lines) for part in measured
    )


def _is_loop_bound(script: Script, steps: ast.AST) -> bool:
    """Whether the training loop ends at that number."""
    text = ast.unparse(steps)
    if "len(" in text or isinstance(steps, ast.Constant):
        return False
    return any(
        isinstance(node, ast.While) and text in ast.unparse(node.test) for node in ast.walk(script.tree)
    )


_STEP = "torch.optim.lr_scheduler.ReduceLROnPlateau.step"


@rule("RW616", "error", "M4", "the learning rate depends on a metric that only this rank has measured")
def schedule_of_one_rank(script: Script) -> Iterator[Found]:
    if not script.has_init:
        return
    for call in script.calls_of(_STEP):
        metric = call.arg(0, "metrics")
        if metric is not None and metric.spread is Spread.LOCAL and not call.guards:
            text = written(call.arg_node(0, "metrics"))
            yield Found(
                call.node,
                f"`{text}` comes from this rank's own data: ranks lower their learning rates at different steps, and the replicas diverge",
                f"average `{text}` over all ranks (all_reduce) before the scheduler gets it",
            )
