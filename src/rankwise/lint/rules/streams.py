"""Streams of samples, and how many a rank gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import (
    given,
    hf_stream,
    is_given_away,
    is_prepared,
    is_stream,
    loaders_in,
    passes,
    shown,
)
from rankwise.lint.analyses.in_ranks import differs_deeply
from rankwise.lint.analyses.job_view import is_distributed, node_in, once, places, text_of
from rankwise.lint.analyses.shares import (
    classes_in,
    draws_at_random,
    loop_shares,
    splits_by_rank,
    splits_by_worker,
    spreads_otherwise,
)
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.calls import is_alone
from rankwise.lint.library.names import ACCELERATOR, LOADER, PL_TRAINER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Value
    from rankwise.lint.script import Script


@rule("RW510", "error", "X7", "an IterableDataset yields the same samples on each rank")
def stream_not_split(script: Script) -> Iterator[Found]:
    if spreads_otherwise(script.all_calls):
        return
    for one in passes(script):
        call = one.loader.call
        if call is None or is_prepared(one.loader) or one.guards or call.guards:
            continue
        if not is_distributed(one.entry) or any(other.name.startswith(ACCELERATOR) for other in one.history.calls):
            continue
        dataset = given(call, "dataset")
        if dataset is None or loop_shares(one) or is_given_away(one):
            continue
        what = _same_everywhere(dataset)
        node = node_in(script, call) or (one.over if one.module is script.module else None)
        if what is not None and node is not None:
            message = f"each rank gets all samples of {what[0]} from the loop over `{shown(one)}`: nothing in it uses the rank"
            yield Found(node, message, what[1], severity="error" if one.syncs else "warning")
    yield from _fitted(script)


def _fitted(script: Script) -> Iterator[Found]:
    """Streams that a Trainer of Lightning's goes over, which gives samplers to other loaders only."""
    for call in script.calls_of(f"{PL_TRAINER}.fit"):
        made = getattr(call.receiver.thing, "call", None)
        strategy = made.kwargs.get("strategy") if made is not None else None
        if strategy is None or strategy.const in {"auto", "single_device", None} or is_alone(call):
            continue
        if getattr(strategy.thing, "kind", "").endswith(".SingleDeviceStrategy"):
            continue
        for loader in (one for value in (*call.args, *call.kwargs.values()) for one in loaders_in(value)):
            dataset = given(loader.call, "dataset") if loader.call is not None else None
            splits = loader.call is None or loader.call.arg(None, "worker_init_fn") is not None
            if dataset is not None and not splits and (what := _same_everywhere(dataset)) is not None:
                message = f"each rank gets all samples of {what[0]}: Lightning splits no streams between the ranks"
                yield Found(call.node, message, what[1], severity="warning")


def _same_everywhere(dataset: Value) -> tuple[str, str] | None:
    if differs_deeply(dataset):
        return None
    classes = list(classes_in(dataset))
    if is_stream(dataset):
        if any(splits_by_rank(cls) or draws_at_random(cls) for cls in classes):
            return None
        name = dataset.thing.cls.node.name
        by_worker = any(splits_by_worker(cls) for cls in classes)
        also = " and its world size, and by the worker id" if by_worker else " and its world size"
        return (
            f"`{name}`",
            f"in {name}.__iter__ take every world_size-th sample from the rank on, by dist.get_rank(){also}",
        )
    made = hf_stream(dataset)
    if made is not None:
        return (
            f"`{text_of(made.node)}`",
            "split it: split_dataset_by_node(dataset, rank=dist.get_rank(), world_size=dist.get_world_size())",
        )
    return None


@rule("RW511", "error", "X7", "each worker of a loader yields its rank's whole share")
def stream_repeated_by_workers(script: Script) -> Iterator[Found]:
    for place in once(places(script, LOADER)):
        call = place.last
        dataset, workers = given(call, "dataset"), given(call, "num_workers")
        if dataset is None or workers is None or not is_stream(dataset) or not is_distributed(place.entry):
            continue
        if not isinstance(workers.const, int) or workers.const < 2 or given(call, "worker_init_fn") is not None:
            continue
        classes = list(classes_in(dataset))
        by_rank = any(splits_by_rank(cls) for cls in classes)
        if not by_rank or any(splits_by_worker(cls) or draws_at_random(cls) for cls in classes):
            continue
        name = dataset.thing.cls.node.name
        message = (
            f"each of the {workers.const} workers yields this rank's whole share: `{name}` never uses the worker id"
        )
        fix = f"in {name}.__iter__ also split by torch.utils.data.get_worker_info() (its id and num_workers)"
        yield Found(node_in(script, call) or call.node, message, fix)
