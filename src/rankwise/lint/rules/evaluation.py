"""Samples that evaluation counts twice, and numbers of one rank that are told as those of all."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.library.names import ACCELERATOR, SAMPLER
from rankwise.lint.model.values import Items, Object, Spread
from rankwise.lint.rule import rule
from rankwise.lint.topics.data_flow import SAMPLER_AT, is_prepared, passes, sampler_of, shown
from rankwise.lint.topics.job_view import above, function_of, is_distributed, node_in, once, places, text_of
from rankwise.lint.topics.lengths import length_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.history import History
    from rankwise.lint.model.values import Value
    from rankwise.lint.script import Script
    from rankwise.lint.topics.data_flow import Pass

#: `predictions[: len(loader.dataset) - seen]`: repeated samples are cut off by hand.
_CUT = re.compile(r"len\([\w.]*dataset\w*\)\s*-|remainder|\[\s*:\s*len\(")
_SUMS = frozenset(
    "torch.distributed." + name
    for name in ("all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor")
)
_OBJECTS = frozenset({"torch.distributed.all_gather_object", "torch.distributed.gather_object"})
#: Worlds are of these sizes, or of their multiples.
_COMMON = 8


@rule("RW512", "warning", "X8", "samples repeated as padding count twice in the evaluation")
def evaluation_counts_padding(script: Script) -> Iterator[Found]:
    seen: set[int] = set()
    for one in passes(script):
        if one.trains:
            continue
        for call, node, message, fix in _found(script, one):
            if id(call.node) not in seen:
                seen.add(id(call.node))
                yield Found(node, message, fix)  # type: ignore[arg-type]


def _found(script: Script, one: Pass) -> Iterator[tuple[Call, object, str, str]]:
    if is_prepared(one.loader):
        if _CUT.search(one.module.text):
            return
        for call in one.history.calls:
            if (
                call.name == f"{ACCELERATOR}.gather"
                and call in one.inside
                and (node := node_in(script, call)) is not None
            ):
                yield call, node, _GATHER, "use gather_for_metrics, which drops the repeated samples"
        return
    sampler = sampler_of(one.loader)
    if sampler is None or sampler.call is None or not _pads(sampler.call):
        return
    node = node_in(script, sampler.call)
    if _CUT.search(one.module.text):
        return
    if (
        node is not None
        and not _is_used_for_training(script, one, sampler)
        and _is_summed(one.history, one.inside[-1].index if one.inside else sampler.call.index, one)
    ):
        message = f"the sampler repeats samples to give all ranks the same number; they count twice in what is reduced after the loop over `{shown(one)}`"
        yield sampler.call, node, message, _FIX


def _never_shuffles(call: Call) -> bool:
    shuffle = call.arg(SAMPLER_AT["shuffle"], "shuffle")
    return shuffle is not None and shuffle.const is False


def _pads(call: Call) -> bool:
    drop = call.arg(SAMPLER_AT["drop_last"], "drop_last")
    if call.has_star or (drop is not None and drop.const is not False):
        return False
    length = length_of(call.arg(0, "dataset"))
    return length is None or length % _COMMON != 0


def _is_used_for_training(script: Script, one: Pass, sampler: Object) -> bool:
    return any(
        other.trains
        for other in passes(script)
        if other.history is one.history and sampler_of(other.loader) is sampler
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
            given = call.arg(1, "obj", "object")
            node = call.arg_node(1, "obj", "object")
            return not (
                given is not None and isinstance(given.thing, Items) and given.thing.keys is not None
            ) and not _is_table(call, text_of(node))
    return False


def _never_shuffles_pass(one: Pass) -> bool:
    sampler = sampler_of(one.loader)
    return sampler is not None and sampler.call is not None and _never_shuffles(sampler.call)


def _is_table(call: Call, name: str) -> bool:
    """Whether a name holds a table by index, so that duplicates coincide."""
    return f"{name}[" in call.module.text or f"{name} = {{" in call.module.text


_GATHER = "gather keeps the samples that pad the last batch, so they count twice"
_FIX = "give each rank range(rank, len(dataset), world_size) by Subset, and reduce sums and counts; or drop the repeated samples by their index"
_TELLS = frozenset({"print", "log", "add_scalar", "info", "log_metric", "log_metrics", "log_dict", "write", "set_postfix", "add_scalars"})  # fmt: skip
_METRIC = re.compile(
    r"loss|acc|metric|score|error|auc|recall|precision|perplexity|ppl|bleu|f1|iou|\bmap\b|psnr", re.IGNORECASE
)
_JUDGED = re.compile(r"val|test|eval|acc|score|auc|recall|f1|iou|bleu", re.IGNORECASE)
#: `ACC_STEPS` is no accuracy.
_CONSTANTS = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
_LOCAL = re.compile(r"local|rank|this process|own|shard", re.IGNORECASE)
#: Functions that may combine the numbers of all ranks.
_TOGETHER = re.compile(r"reduce|gather|sync|aggregat|average|across|collect|broadcast", re.IGNORECASE)
_WORLD = re.compile(r"world|replicas|nprocs|num_processes|size", re.IGNORECASE)


@rule("RW611", "hint", "M1", "rank 0's own loss or accuracy is reported as that of all ranks")
def one_ranks_number_as_all(script: Script) -> Iterator[Found]:
    yield from _divided_by_all(script)
    seen: set[int] = set()
    for place in once(places(script)):
        call = place.calls[0]
        if (
            call.name.rpartition(".")[2] not in _TELLS
            or place.ranks != {0}
            or id(call.function) in seen
            or not is_distributed(place.entry)
        ):
            continue
        text = ast.unparse(call.node)
        if not _METRIC.search(text) or _LOCAL.search(text) or call.name.startswith("torch.distributed"):
            continue
        if any(_is_own(value) for value in _told(call)) and not _is_computed_here(script, call):
            seen.add(id(call.function))
            is_judged = _JUDGED.search(_CONSTANTS.sub("", text)) is not None
            what = "validation number" if is_judged else "loss"
            yield Found(
                call.node,
                f"`{text_of(call.node)}` reports the {what} of rank 0's share of the data as that of all ranks",
                "all_reduce sums and counts over the ranks first, or say in the output that it is rank 0's",
                severity="warning" if is_judged else "hint",
            )


def _divided_by_all(script: Script) -> Iterator[Found]:
    """Counts of one rank's share that are divided by the number of all samples, and reduced nowhere."""
    seen: set[int] = set()
    for one in passes(script):
        sampler = sampler_of(one.loader)
        if one.trains or one.module is not script.module or id(one.loop) in seen or _is_put_together(one):
            continue
        seen.add(id(one.loop))
        made = sampler.call if sampler is not None else None
        if made is None or made.name != SAMPLER:
            continue
        for node in _divisions(script.tree, one, made):
            yield Found(
                node,
                f"`{text_of(node)}` divides this rank's count by the number of all samples: on W ranks it"
                " is about 1/W of the true number",
                f"all_reduce `{text_of(node.left)}` over the ranks first, or divide by the number of samples that this rank saw",
                severity="warning",
            )


def _is_put_together(one: Pass) -> bool:
    first = one.inside[0].index if one.inside else 0
    return any(
        call.index >= first and _TOGETHER.search(call.name.rpartition(".")[2]) for call in one.history.calls
    )


def _divisions(tree: ast.Module, one: Pass, made: Call) -> Iterator[ast.BinOp]:
    """``correct / len(data)`` after a loop that counts ``correct``."""
    around, end = function_of(tree, one.loop), getattr(one.loop, "end_lineno", 0)
    loader = one.loader.call
    data = {text_of(made.arg_node(0, "dataset")), f"{shown(one)}.dataset", f"{shown(one)}.sampler.dataset"}
    if loader is not None:
        data.add(text_of(loader.arg_node(0, "dataset")))
    numbers = {f"len({name})" for name in data if name}
    numbers |= {
        text_of(part.targets[0])
        for part in ast.walk(around)
        if isinstance(part, ast.Assign) and text_of(part.value) in numbers
    }
    counted = {text_of(part.target) for part in ast.walk(one.loop) if isinstance(part, ast.AugAssign)}
    for node in ast.walk(around):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and node.lineno > end
            and text_of(node.right) in numbers
            and not _WORLD.search(text_of(node.left))
            and any(text_of(part) in counted for part in ast.walk(node.left))
        ):
            yield node


def _told(call: Call) -> Iterator[Value]:
    for value in (*call.args, *call.kwargs.values()):
        yield value
        if isinstance(value.thing, Items):
            yield from value.thing.values


def _is_computed_here(script: Script, call: Call) -> bool:
    """Whether rank 0 alone has computed the number, over whatever data it chose."""
    blocks = [
        one
        for one in above(script.tree, call.node)
        if isinstance(one, ast.If) and any(one.test is guard.node for guard in call.guards)
    ]
    made = {
        name.id
        for block in blocks
        for one in ast.walk(block)
        if isinstance(one, ast.Assign)
        for target in one.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    reported = {name.id for name in ast.walk(call.node) if isinstance(name, ast.Name)}
    functions = {one.name for one in ast.walk(script.tree) if isinstance(one, ast.FunctionDef)}
    return bool(made & reported) or bool(reported & functions)


def _is_own(value: Value) -> bool:
    return (
        value.spread is Spread.LOCAL and bool({"item", "data"} & value.origin) and "time" not in value.origin
    )
