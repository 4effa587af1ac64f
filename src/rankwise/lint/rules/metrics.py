"""Numbers that are averaged, summed or logged wrongly over the ranks."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import given, passes, sampler_of
from rankwise.lint.analyses.in_ranks import is_in_ranks
from rankwise.lint.analyses.job_view import (
    differs,
    function_of,
    is_distributed,
    node_in,
    once,
    places,
    starts_group,
    statement_of,
    text_of,
)
from rankwise.lint.analyses.saved_files import is_chosen
from rankwise.lint.analyses.shares import is_shared_out
from rankwise.lint.analyses.summing import by_ranks, divides, is_division, is_sum
from rankwise.lint.analyses.tensor_text import nodes_in, root_of
from rankwise.lint.analyses.tensors import is_mean
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.calls import is_of_one_device
from rankwise.lint.interpreter.values import Items, Object
from rankwise.lint.library.names import PL_TRAINER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

_REDUCES = (
    "torch.distributed.all_reduce",
    "torch.distributed.reduce",
    "accelerate.Accelerator.reduce",
    "accelerate.Accelerator.gather",
    "lightning.fabric.Fabric.all_reduce",
)


@rule("RW612", "warning", "M2", "means of ranks with different numbers of samples are averaged")
def mean_of_means(script: Script) -> Iterator[Found]:
    for place in once(places(script, *_REDUCES)):
        value, node = place.last.arg(0, "tensor"), place.last.arg_node(0, "tensor")
        if (
            value is not None
            and _is_over_samples(value)
            and _is_averaged(script, place.last)
            and not _is_even(script, place)
        ):
            yield Found(
                place.last.node,
                f"`{text_of(node)}` is a mean over this rank's samples: averaged over ranks it is wrong if the sample counts differ",
                "reduce the sum and the count, then divide",
            )


def _is_even(script: Script, place: Place) -> bool:
    """Whether what was counted before comes from a loader that gives each rank as many samples, in batches of one size."""
    before = [
        one
        for one in passes(script)
        if one.entry is place.entry and one.inside and one.inside[0].index < place.last.index
    ]
    loader = max(before, key=lambda one: one.inside[0].index).loader if before else None
    drops = given(loader.call, "drop_last") if loader is not None and loader.call is not None else None
    if loader is None or not is_shared_out(loader):
        return loader is not None
    return sampler_of(loader) is not None and drops is not None and drops.const is True


def _is_over_samples(value: Value) -> bool:
    """Whether it is a mean over a number of samples, or of batches, that may differ between ranks."""
    made = value.made.receiver.made if value.made is not None and value.made.name.endswith(".mean") else None
    parts = made.args[0].thing if made is not None and made.name in {"torch.stack", "torch.cat"} else None
    return (isinstance(parts, Items) and not parts.is_whole) or ("ratio" in value.origin and is_mean(value))


def _is_averaged(script: Script, call: Call) -> bool:
    """Whether the sum over ranks becomes a mean: by the operation, or by a division by the number of ranks."""
    if not call.name.startswith("torch.distributed."):
        how = call.arg(1, "reduction")
        return how.const == "mean" if how is not None else not call.name.endswith("Accelerator.reduce")
    inside = set(nodes_in(function_of(script.tree, call.node)))
    return not is_sum(call) or not inside.isdisjoint(by_ranks(script))


@rule("RW613", "warning", "M3", "a mean is summed over the ranks and never divided")
def sum_told_as_mean(script: Script) -> Iterator[Found]:
    for place in once(places(script, "torch.distributed.all_reduce", "torch.distributed.reduce", anywhere=True)):
        call, at = place.last, node_in(script, place.last)
        value, node = call.arg(0, "tensor"), call.arg_node(0, "tensor")
        is_here = call.module is script.module
        if (
            at is None
            or value is None
            or not is_mean(value)
            or not is_sum(call)
            or not (is_here or place.entry.is_program)
        ):
            continue
        if not divides(script, function_of(call.module.tree, call.node)) and (is_here or not _is_divided(script, at)):
            yield Found(
                at,
                f"`{text_of(node)}` is a mean of this rank's, summed over all ranks and never divided by their number",
                f"divide afterwards: {text_of(root_of(node))} /= dist.get_world_size()",
            )


def _is_divided(script: Script, call: ast.AST) -> bool:
    """Whether a function divides what a call in it gives, or may."""
    statement = statement_of(script.tree, call)
    if not isinstance(statement, ast.Assign):
        return True
    names = {ast.unparse(target) for target in statement.targets}
    inside = nodes_in(function_of(script.tree, call))
    return any(is_division(one) and any(getattr(part, "id", "") in names for part in ast.walk(one)) for one in inside)


_RUNS = {"wandb.init": "opens its own run in W&B", "mlflow.start_run": "starts its own run in MLflow",
         "torch.utils.tensorboard.SummaryWriter": "writes events into one folder", "neptune.init_run": "opens its own run in Neptune",
         "comet_ml.Experiment": "opens its own experiment in Comet", "aim.Run": "opens its own run in Aim"}  # fmt: skip
_BARS = frozenset({"tqdm.tqdm", "tqdm.trange", "rich.progress.track"})


@rule("RW614", "warning", "M5", "every rank opens its own run, writer or progress bar")
def every_rank_logs(script: Script) -> Iterator[Found]:
    shown: set[str] = set()
    lines: set[int] = set()
    for place in once(places(script, *_RUNS, *_BARS, anywhere=True)):
        call, at = place.calls[0], node_in(script, place.calls[0])
        if (
            at is None
            or not _is_made_by_ranks(script, place)
            or any(differs(value) for value in (*call.args, *call.kwargs.values()))
        ):
            continue
        line = getattr(at, "lineno", 0)
        if line in lines:
            continue
        if call.name in _RUNS and "group" not in call.kwargs:
            lines.add(line)
            yield Found(at, f"every rank {_RUNS[call.name]}", "do it on rank 0 only: `if dist.get_rank() == 0:`")
        elif call.name in _BARS - shown and "disable" not in call.kwargs:
            shown.add(call.name)
            message = "every rank shows this bar, overwriting the others"
            yield Found(at, message, "`disable=dist.get_rank() != 0`", severity="hint")


def _is_made_by_ranks(script: Script, place: Place) -> bool:
    # Where the ranks are spawned, another way of the program may call the same function in the one process that it is.
    is_rank = all(is_in_ranks(script, place.entry, one) for one in place.calls)
    return (
        is_rank
        and place.is_made_by_all
        and is_distributed(place.entry)
        and any(map(starts_group, place.entry.histories[0].calls))
        and not is_chosen(place.calls[0])
    )


_LOG = "lightning.pytorch.LightningModule.log"
_WATCHERS = ("ModelCheckpoint", "EarlyStopping")
_PLACES = frozenset({"validation_step", "test_step", "on_validation_epoch_end", "on_validation_batch_end"})


@rule("RW617", "warning", "M6 M1", "Lightning monitors a metric that each rank logs for itself")
def monitored_without_sync(script: Script) -> Iterator[Found]:
    watched = {
        value.const
        for call in script.all_calls
        if call.name.endswith(_WATCHERS) and (value := call.arg(None, "monitor")) is not None
    }
    trainers = [call for call in script.all_calls if call.name == PL_TRAINER]
    if not watched or (trainers and all(map(is_of_one_device, trainers))):
        return
    for call in script.calls_of(_LOG):
        name, value = call.arg(0, "name"), call.arg(1, "value")
        sync = call.arg(None, "sync_dist")
        is_metric = (
            value is not None and isinstance(value.thing, Object) and value.thing.kind.startswith("torchmetrics")
        )
        if name is None or name.const not in watched or is_metric or (sync is not None and sync.const is not False):
            continue
        if call.function is not None and call.function.name in _PLACES:
            yield Found(
                call.node,
                f"{name.const!r} is the mean over this rank's batches, and a callback monitors it",
                "log it with sync_dist=True",
            )
