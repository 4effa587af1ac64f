"""Samples that evaluation counts twice, and numbers of one rank that are told as those of all."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import SAMPLER_AT, is_prepared, passes, sampler_of, shown
from rankwise.lint.analyses.job_view import all_once, is_distributed, is_hidden, node_in, text_of
from rankwise.lint.analyses.lengths import length_of
from rankwise.lint.analyses.saved_files import is_alike
from rankwise.lint.analyses.shares import is_shared_out
from rankwise.lint.analyses.tensors import OFF, is_model_call, sources_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.notes import Quotient
from rankwise.lint.interpreter.values import Items, Object, Spread
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.names import ACCELERATOR
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.data_flow import Pass
    from rankwise.lint.interpreter.history import History
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

#: `predictions[: len(loader.dataset) - seen]`: repeated samples are cut off by hand.
_CUT = re.compile(r"len\([\w.]*dataset\w*\)\s*-|remainder|\[\s*:\s*len\(")
_SUMS = frozenset(
    "torch.distributed." + name for name in ("all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor")
)
_OBJECTS = frozenset({"torch.distributed.all_gather_object", "torch.distributed.gather_object"})
#: Worlds are of these sizes, or of their multiples.
_COMMON = 8


@rule("RW512", "warning", "X8", "samples repeated as padding count twice in the evaluation")
def evaluation_counts_padding(script: Script) -> Iterator[Found]:
    for one in passes(script):
        if not one.trains and not _CUT.search(one.module.text):
            yield from _found(script, one)


def _found(script: Script, one: Pass) -> Iterator[Found]:
    if is_prepared(one.loader):
        for call in one.history.calls:
            if (
                call.name == f"{ACCELERATOR}.gather"
                and call in one.inside
                and (node := node_in(script, call)) is not None
            ):
                yield Found(node, _GATHER, "use gather_for_metrics, which drops the repeated samples")
        return
    sampler = sampler_of(one.loader)
    if sampler is None or sampler.call is None or not _pads(sampler.call):
        return
    node = node_in(script, sampler.call)
    if (
        node is not None
        and not _is_used_for_training(script, one, sampler)
        and _is_summed(one.history, one.inside[-1].index if one.inside else sampler.call.index, one)
    ):
        message = f"the sampler repeats samples to give all ranks the same number; they count twice in what is reduced after the loop over `{shown(one)}`"
        yield Found(node, message, _FIX)


def _pads(call: Call) -> bool:
    drop = call.arg(SAMPLER_AT["drop_last"], "drop_last")
    if call.has_star or (drop is not None and drop.const is not False):
        return False
    length = length_of(call.arg(0, "dataset"))
    return length is None or length % _COMMON != 0


def _is_used_for_training(script: Script, one: Pass, sampler: Object) -> bool:
    return any(
        other.trains for other in passes(script) if other.history is one.history and sampler_of(other.loader) is sampler
    )


def _is_summed(history: History, after: int, one: Pass) -> bool:
    is_eval = any(
        "no_grad" in call.contexts or "inference_mode" in call.contexts for call in one.inside
    ) or _never_shuffles_pass(one)
    if not is_eval:
        return False
    if any(call.name in _SUMS for call in one.inside):
        return True
    following = [call for call in history.calls[after:] if call.index > after]
    # The first thing reduced after the loop is what was counted in it.
    for call in following:
        if call.name in _SUMS:
            return True
        if call.name in _OBJECTS:
            # In a table by index duplicates coincide.
            given = call.arg(1, "obj", "object")
            return not (given is not None and isinstance(given.thing, Items) and given.thing.keys is not None)
    return False


def _never_shuffles_pass(one: Pass) -> bool:
    sampler = sampler_of(one.loader)
    made = sampler.call if sampler is not None else None
    shuffle = made.arg(SAMPLER_AT["shuffle"], "shuffle") if made is not None else None
    return shuffle is not None and shuffle.const is False


_GATHER = "gather keeps the samples that pad the last batch, so they count twice"
_FIX = "give each rank range(rank, len(dataset), world_size) by Subset, and reduce sums and counts; or drop the repeated samples by their index"
_TELLS = frozenset(
    """print log add_scalar info log_metric log_metrics log_dict write set_postfix add_scalars""".split()  # noqa: SIM905
)
#: What a line says that tells whose number it is.
_LOCAL = re.compile(r"local|rank|this process|own|shard", re.IGNORECASE)


@rule("RW611", "hint", "M1", "rank 0's own loss or accuracy is reported as that of all ranks")
def one_ranks_number_as_all(script: Script) -> Iterator[Found]:
    yield from _divided_by_all(script)
    seen: set[int] = set()
    for place in all_once(script):
        call = place.calls[0]
        is_first = place.ranks == {0} or place.is_once_a_node
        is_reported = call.name.rpartition(".")[2] in _TELLS and is_first and is_distributed(place.entry)
        if not is_reported or id(call.function) in seen or _LOCAL.search(ast.unparse(call.node)):
            continue
        forwards = [one for value in _reported(call) if _is_own(value) for one in _forwards(value)]
        inside = [one for one in passes(script) if any(made in one.inside for made in forwards)]
        if inside and not any(is_shared_out(one.loader) or is_prepared(one.loader) for one in inside):
            continue  # each rank reads all of it, and has the number of all
        # What rank 0 alone has computed, it has over whatever data it chose.
        if any(not one.guards for one in forwards) and "sync_dist" not in call.kwargs:
            seen.add(id(call.function))
            is_judged = any(OFF & set(one.contexts) for one in forwards)
            yield Found(
                call.node,
                f"`{text_of(call.node)}` reports the {'validation number' if is_judged else 'loss'} of rank 0's share of the data as that of all ranks",
                "all_reduce sums and counts over the ranks first, or say in the output that it is rank 0's",
                severity="warning" if is_judged else "hint",
            )


def _divided_by_all(script: Script) -> Iterator[Found]:
    """Sums over one rank's share that are divided by the number of all samples, and reduced nowhere."""
    shared: set[int] = set()
    for one in passes(script):
        sampler = sampler_of(one.loader)
        splits = one.loader.call if is_prepared(one.loader) else sampler.call if sampler is not None else None
        data = splits.arg(0, "dataset") if splits is not None else None
        if data is not None and data.thing is not None and not _is_put_together(one):
            shared.add(id(data.thing))
    for note in script.notes:
        if isinstance(note, Quotient) and (at := _by_whole_batch(script, note)) is not None:
            yield Found(
                at,
                f"`{text_of(note.node)}` divides what is counted in this rank's batch by the size of all ranks' batches together:"
                " on W ranks it is 1/W of the true number",
                "divide by the size of the batch at hand",
                severity="warning",
            )
        measured = note.right.made.args if isinstance(note, Quotient) and note.right.made is not None else ()
        if not measured or note.module is not script.module or id(measured[0].thing) not in shared:
            continue
        if note.left.spread is Spread.LOCAL and "item" in note.left.origin:
            yield Found(
                note.node,
                f"`{text_of(note.node)}` divides what this rank summed over its share by the number of all samples: on W ranks it"
                " is about 1/W of the true number",
                "all_reduce the count over the ranks first, or divide by the number of samples that this rank saw",
                severity="warning",
            )


def _by_whole_batch(script: Script, note: Quotient) -> ast.AST | None:
    """Where a count is divided by what the size of its loader's batches is a rank's part of; None if it is not."""
    for one in passes(script) if note.left.spread is Spread.LOCAL and not note.left.via and note.right.path else ():
        size = one.loader.call.arg(1, "batch_size") if one.loader.call is not None else None
        made = size.made if size is not None else None
        if made is None or made.name != "operator.FloorDiv" or "world_size" not in made.args[1].origin:
            continue
        if is_alike(made.args[0], note.right) and any(part is note.node for part in ast.walk(one.loop)):
            return node_in(script, note)
    return None


def _is_put_together(one: Pass) -> bool:
    """Whether anything after the loop is done together, or may be."""
    first = one.inside[0].index if one.inside else 0
    return any(
        call.name in _SUMS | _OBJECTS or call.name in ACTS or is_hidden(call) for call in one.history.calls[first:]
    )


def _reported(call: Call) -> Iterator[Value]:
    """What a call tells, number by number: a text has what all its parts have, the time of the epoch and what was agreed on too."""
    waiting = [*call.args, *call.kwargs.values()]
    for value in waiting:  # which grows meanwhile
        if isinstance(value.thing, Items):
            yield from value.thing.values
        elif value.made is not None and value.made.name in {"operator.JoinedStr", "operator.Mod", "?.format"}:
            waiting += value.made.args
        else:
            yield value


def _is_own(value: Value) -> bool:
    """Whether it is a number of this rank's data."""
    is_quotient = value.made is not None and value.made.name == "operator.Div"
    is_number = (is_quotient or {"item", "mean", "ratio"} & value.origin) and value.spread is Spread.LOCAL
    return bool(is_number) and value.origin.isdisjoint({"time", "scattered"})


def _forwards(value: Value) -> Iterator[Call]:
    """Calls of a model, or of what may be one, that a number was computed from."""
    made = (one.made for one in sources_of(value, cuts=False))
    yield from (one for one in made if one is not None and (is_model_call(one) or is_hidden(one)))
