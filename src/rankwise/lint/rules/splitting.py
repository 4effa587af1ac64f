"""Data that is not split among the ranks, or twice."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import (
    AT,
    ITERABLE,
    given,
    is_given_away,
    is_prepared,
    is_stream,
    passes,
    sampler_of,
    shown,
)
from rankwise.lint.analyses.job_view import function_of, is_distributed, node_in, once, places, text_of
from rankwise.lint.analyses.shares import (
    is_each_ranks_own,
    is_known_data,
    is_shared_out,
    loop_shares,
    makes_its_samples,
    spreads_otherwise,
)
from rankwise.lint.finding import Edit, Found, span_of
from rankwise.lint.interpreter.values import Instance, Object
from rankwise.lint.library.names import ACCELERATOR, FABRIC, LOADER, SAMPLER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.data_flow import Pass
    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.interpreter.values import Value
    from rankwise.lint.script import Script


@rule("RW503", "error", "X2", "a DataLoader gets a sampler and an argument that excludes it", fixable=True)
def sampler_and_shuffle(script: Script) -> Iterator[Found]:
    for place in once(places(script, LOADER)):
        call = place.last
        for message, fix in _clashes(call) if not _may_be_apart(call) else ():
            words = getattr(call.node, "keywords", ()) if fix.startswith("remove shuffle: ") else ()
            # `shuffle=False` instead of `shuffle=True`: both loaders of a branch keep their form.
            nodes = [one.value for one in words if one.arg == "shuffle" and isinstance(one.value, ast.Constant)]
            edits = [Edit(span=span_of(one, script.lines), text="False") for one in nodes]
            yield Found(call.node, f"ValueError: {message}", fix, edits=edits)
            break


def _clashes(call: Call) -> Iterator[tuple[str, str]]:
    has = {
        name: isinstance(getattr(given(call, name), "thing", None), (Object, Instance))
        for name in ("sampler", "batch_sampler")
    }
    on = [
        name
        for name in ("shuffle", "drop_last")
        if (value := call.arg(AT[name], name)) is not None and value.const is True
    ]
    size, name = (
        call.arg(AT["batch_size"], "batch_size"),
        text_of(call.arg_node(AT["sampler"], "sampler")) or "the sampler",
    )
    others = [
        *on,
        *(["batch_size"] if size is not None and size.const != 1 else []),
        *(["sampler"] if has["sampler"] else []),
    ]
    if has["batch_sampler"] and others:
        yield (
            f"a batch_sampler excludes {', '.join(others)}",
            f"remove {', '.join(others)}: the batch sampler decides",
        )
    if has["sampler"] and "shuffle" in on:
        yield (
            f"`{name}` decides the order, so shuffle=True is not allowed",
            f"remove shuffle: `{name}` does the shuffling",
        )
    dataset = given(call, "dataset")
    if dataset is not None and is_stream(dataset):
        if "shuffle" in on:
            yield (
                "a loader cannot shuffle an IterableDataset",
                "remove shuffle, and shuffle in the data set's __iter__",
            )
        if has["sampler"] and not _is_one_of_several(call):
            what = "an IterableDataset has no indices, so a sampler cannot draw from it"
            yield what, "remove the sampler, and select this rank's share in the data set's __iter__"


def _is_one_of_several(call: Call) -> bool:
    """Whether data set and sampler both come from branches: which goes with which is not known."""
    scope = ast.walk(function_of(call.module.tree, call.node))
    stored = [node.id for node in scope if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return any(stored.count(text_of(call.arg_node(AT[word], word))) > 1 for word in ("dataset", "sampler"))


def _may_be_apart(call: Call) -> bool:
    """Whether the arguments come by a table (``**options``) that gets one or the other on different ways."""
    if all(one.arg is not None for one in getattr(call.node, "keywords", [])):
        return False
    nodes = list(ast.walk(function_of(call.module.tree, call.node)))
    is_changed = any(isinstance(node, ast.Delete) or getattr(node, "attr", "") in {"pop", "update"} for node in nodes)
    return is_changed or any(isinstance(node, ast.If) and _keys(node.body) and _keys(node.orelse) for node in nodes)


def _keys(statements: list[ast.stmt]) -> bool:
    """Whether these statements name arguments of a loader."""
    words = {part.value for one in statements for part in ast.walk(one) if isinstance(part, ast.Constant)}
    return not words.isdisjoint({"shuffle", "sampler", "batch_sampler", "batch_size", "drop_last"})


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
    shuffle = call.arg(AT["shuffle"], "shuffle")
    shuffles = shuffle is not None and shuffle.const is True
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
        bases = thing.cls.library_bases()
        return ITERABLE in bases or thing.cls.find("__getitem__") is None
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
