"""Data that is not split among the ranks, or twice."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import AT, given, is_given_away, is_prepared, is_stream, passes, sampler_of, shown
from rankwise.lint.analyses.job_view import above, all_once, is_distributed, is_hidden, node_in, once, places, text_of
from rankwise.lint.analyses.shares import (
    is_each_ranks_own,
    is_known_data,
    is_shared_out,
    loop_shares,
    makes_its_samples,
    reads_alike,
    spreads_otherwise,
)
from rankwise.lint.analyses.tensors import OFF, sources_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Instance, Object
from rankwise.lint.library.names import ACCELERATOR, DDP, FABRIC, SAMPLER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.data_flow import Pass
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


_CHOICE = re.compile(r"dist|ddp|world|rank|gpu|parallel|launcher|multi|slurm|sampler|device", re.IGNORECASE)


@rule("RW504", "error", "X3", "each rank trains on the whole data set, because nothing splits it")
def data_not_split(script: Script) -> Iterator[Found]:
    if spreads_otherwise(script.all_calls):
        return
    for one in passes(script):
        call = one.loader.call
        if call is None or not _is_whole_for_all(script, one):
            continue
        node = node_in(script, call)
        node = one.over if node is None and one.module is script.module else node
        finding = _finding(one, call, node) if node is not None else None
        if finding is not None:
            yield finding

    for place in all_once(script, anywhere=True):
        call, node = place.last, node_in(script, place.last)
        reader = _reader(call.args[0]) if call.name == f"{DDP}.__call__" and call.args else None
        if reader is not None and node is not None and place.is_made_by_all and not OFF & set(call.contexts):
            message = (
                f"each rank trains on the same batches: `{reader.name}`, which reads them, does not ask for the rank"
            )
            yield Found(
                node,
                message,
                "let each rank begin at its own place, and go on by world_size batches",
                severity="warning",
            )


def _reader(batch: Value) -> ast.ClassDef | None:
    """The class that has read a batch from a file, if all that was done with it since is in sight and the same on all ranks."""
    made = [one.made for one in sources_of(batch, cuts=False) if one.made is not None]
    read = next((one for one in made if one.name in {"builtins.open", "numpy.memmap", "numpy.load"}), None)
    if batch.spread or read is None or any(one.name.startswith("?") and is_hidden(one) for one in made):
        return None
    cls = next((one for one in above(read.module.tree, read.node) if isinstance(one, ast.ClassDef)), None)
    return cls if cls is not None and reads_alike(cls) else None


def _is_whole_for_all(script: Script, one: Pass) -> bool:
    call = one.loader.call
    if call is None or is_prepared(one.loader) or is_shared_out(one.loader) or one.guards or call.guards:
        return False
    if any(_CHOICE.search(text_of(test)) for test, _value, _arm in call.tests) or not is_distributed(one.entry):
        return False
    if any(
        other.name.endswith((".prepare", ".setup_dataloaders", ".prepare_data_loader")) and other.has_star
        for other in script.all_calls
    ):
        return False
    sampler = call.arg_node(AT["sampler"], "sampler")
    if isinstance(sampler, ast.IfExp) and isinstance(sampler.orelse, ast.Constant):
        return False  # `sampler=sampler if ... else None`: which, only a run can tell
    if not one.syncs and is_each_ranks_own(one.entry, call):
        return False
    return not loop_shares(one) and not is_given_away(one)


def _finding(one: Pass, call: Call, node: object) -> Found | None:
    dataset = given(call, "dataset")
    if dataset is None or makes_its_samples(dataset) or _is_stream(dataset):
        return None
    shuffle, sampler = call.arg(AT["shuffle"], "shuffle"), getattr(given(call, "sampler"), "thing", None)
    kind, made = getattr(sampler, "kind", ""), getattr(sampler, "call", None)
    if made is not None and made.arg(1 if "Weighted" in kind else 2, "num_samples") is not None:
        return None  # it may be a rank's share
    shuffles = (shuffle is not None and shuffle.const is True) or kind.endswith(".RandomSampler")
    if not one.syncs and not (shuffles and one.entry.is_program and is_known_data(dataset)):
        return None
    if not is_known_data(dataset) and not shuffles:
        return None
    severity = "error" if one.syncs and is_known_data(dataset) else "warning"
    what = text_of(call.arg_node(0, "dataset")) or "the data set"
    message, fix = _words(one, call, what)
    return Found(node, message, fix, severity=severity)  # type: ignore[arg-type]


def _words(one: Pass, call: Call, what: str) -> tuple[str, str]:
    frame = next((other for other in one.history.calls if other.name in {ACCELERATOR, FABRIC}), None)
    over = shown(one)
    if frame is not None and not one.history.calls[0].name.startswith("torch.distributed"):
        how = "accelerator.prepare" if frame.name == ACCELERATOR else "fabric.setup_dataloaders"
        return (
            f"each rank reads all of `{what}`: its loader is not passed to {how}",
            f"pass the loader through {how} before the loop over `{over}`",
        )
    sampler = next(
        (
            other
            for other in one.history.calls
            if other.name == SAMPLER and _same(other.arg(0, "dataset"), given(call, "dataset"))
        ),
        None,
    )
    if sampler is not None:
        message = f"each rank reads all of `{what}`: a DistributedSampler is created for it (line {getattr(sampler.node, 'lineno', 0)}), but this loader does not get it"
        return message, "pass it: DataLoader(..., sampler=sampler), without shuffle=True"
    other = call.arg_node(AT["sampler"], "sampler")
    instead = f"`{text_of(other)}`" if other is not None else "shuffle"
    return (
        f"each rank reads all of `{what}`: nothing splits it between the ranks",
        f"pass sampler=DistributedSampler({what}) instead of {instead}, and call its set_epoch(epoch) in each epoch",
    )


def _same(one: Value | None, other: Value | None) -> bool:
    return one is not None and other is not None and one.thing is not None and one.thing is other.thing


def _is_stream(dataset: Value) -> bool:
    thing = dataset.thing
    if isinstance(thing, Instance):
        return is_stream(dataset) or thing.cls.find("__getitem__") is None
    return isinstance(thing, Object) and (
        "Iterable" in thing.kind or thing.kind.startswith(("webdataset", "torchdata", "streaming", "litdata"))
    )


@rule(
    "RW506",
    "warning",
    "X3",
    "a loader with a DistributedSampler is passed to accelerator.prepare, which splits it again",
)
def data_split_twice(script: Script) -> Iterator[Found]:
    for place in once(places(script, f"{ACCELERATOR}.prepare", f"{ACCELERATOR}.prepare_data_loader", anywhere=True)):
        for value in place.last.args:
            loader = value.thing
            sampler = sampler_of(loader) if isinstance(loader, Object) and loader.call is not None else None
            if sampler is None or sampler.call is None:
                continue
            node = node_in(script, sampler.call) or node_in(script, place.last)
            if node is not None:
                yield Found(node, _MESSAGE, _FIX)


_MESSAGE = "accelerator.prepare splits this loader again: with N processes each one sees one sample of N x N"
_FIX = "pass shuffle=True and no sampler: accelerator.prepare splits it"
