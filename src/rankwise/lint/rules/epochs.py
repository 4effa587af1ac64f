"""A DistributedSampler's epoch, seed and share."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import SAMPLER_AT, shown
from rankwise.lint.analyses.epochs import is_reached, loops_of, reshuffled, set_epoch_calls
from rankwise.lint.analyses.in_ranks import is_in_ranks
from rankwise.lint.analyses.job_view import function_of, is_distributed, is_spawned, node_in, once, places, text_of
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.finding import Found
from rankwise.lint.library.names import SAMPLER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.analyses.data_flow import Pass
    from rankwise.lint.analyses.epochs import Shuffled
    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


@rule("RW501", "error", "X1", "set_epoch is never called on a DistributedSampler, so each epoch uses the same order")
def set_epoch_forgotten(script: Script) -> Iterator[Found]:
    for one in reshuffled(script):
        silent = [each for each in one.passes if not is_reached(each, one)]
        if not silent:
            continue
        node = node_in(script, one.sampler.call) if one.sampler.call is not None else None
        if node is None:
            node = silent[0].over if silent[0].module is script.module else None
        if node is None:
            continue
        yield Found(node, _message(one, silent), _fix(silent[0], one))


def _message(one: Shuffled, silent: list[Pass]) -> str:
    what = f"`{shown(silent[0])}`"
    reported = len(one.passes) - len(silent)
    if reported:
        return f"only some ranks call set_epoch on the sampler of {what}: the others shuffle for another epoch, so samples are repeated or missed"
    return f"set_epoch is never called on this sampler, so each epoch reads {what} in the same order"


def _fix(one: Pass, shuffled: Shuffled) -> str:
    loop = loops_of(one, shuffled)[-1]
    target = getattr(loop, "target", None)
    name = text_of(target) if target is not None else "epoch"
    name = "epoch" if name == "_" else name
    sampler = _name_of(one, shuffled)
    what = f"`{sampler}.set_epoch({name})`" if sampler else f"set_epoch({name}) on the sampler"
    return f"call {what} at the start of each epoch, on all ranks, before the loop over `{shown(one)}`"


def _name_of(one: Pass, shuffled: Shuffled) -> str:
    """The sampler's name at the loop; empty if it has none there."""
    made, tree, loader = shuffled.sampler.call, one.module.tree, one.loader.call
    above = scopes_of(tree).parents.get(made.node) if made is not None else None
    name = text_of(above.targets[0]) if isinstance(above, ast.Assign) else ""
    if above is not None and function_of(tree, above) in {tree, function_of(tree, one.over)} and name.isidentifier():
        return name
    is_given = loader is not None and "sampler" in loader.kwargs
    return f"{shown(one)}.sampler" if is_given and shown(one).replace(".", "_").isidentifier() else ""


@rule("RW502", "error", "X1", "set_epoch is called where it cannot change the order of the samples")
def set_epoch_without_effect(script: Script) -> Iterator[Found]:
    for one in reshuffled(script):
        first = one.passes[0]
        loops = loops_of(first, one)
        calls = set_epoch_calls(first)
        unclear = [call for call in first.history.calls if call.name == "?.set_epoch"]
        faults = [_fault(call, first, loops) for call in calls]
        if unclear or not calls or None in faults:
            continue
        for call, fault in zip(calls, faults, strict=True):
            node = node_in(script, call)
            if node is not None and fault is not None:
                target = next((text_of(loop.target) for loop in reversed(loops) if isinstance(loop, ast.For)), "epoch")
                fix = f"call set_epoch({'epoch' if target == '_' else target}) at the start of each epoch, before the loop over `{shown(first)}`"
                yield Found(node, fault[1], fix, severity=fault[0])


def _fault(call: Call, one: Pass, loops: list[ast.AST]) -> tuple[Severity, str] | None:
    over = shown(one)
    given = call.arg_node(0, "epoch")
    if not set(loops) & set(call.loops):
        return ("error", f"set_epoch is called once, before all epochs, so each epoch reads `{over}` in the same order")
    value = call.arg(0, "epoch")
    if value is not None and value.is_known:
        return (
            "error",
            f"set_epoch gets {value.const!r} in each epoch, so each epoch reads `{over}` in the same order",
        )
    plain = isinstance(given, ast.Name) and any(
        isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and loop.target.id == given.id for loop in loops
    )
    if not plain:
        return None
    if one.loop in call.loops:
        return (
            "warning",
            f"set_epoch is called after the order of this epoch was drawn: the first two epochs over `{over}` are equal",
        )
    if one.inside and call.index > one.inside[-1].index:
        return (
            "warning",
            f"set_epoch is called after the loop over `{over}`, for a finished epoch: the first two epochs are equal",
        )
    return None


@rule("RW505", "error", "X3", "a DistributedSampler gets a wrong rank or a wrong number of ranks")
def wrong_share(script: Script) -> Iterator[Found]:
    for place in once(places(script, SAMPLER)):
        call = place.last
        if not place.is_made_by_all or call.guards or not is_distributed(place.entry):
            continue
        fault = _fault_of_share(call)
        if fault is not None:
            severity, name, message = fault
            yield Found(call.arg_node(SAMPLER_AT[name], name) or call.node, message, _FIX, severity=severity)


def _fault_of_share(call: Call) -> tuple[Severity, str, str] | None:
    count, rank = call.arg(SAMPLER_AT["num_replicas"], "num_replicas"), call.arg(SAMPLER_AT["rank"], "rank")
    count_node, rank_node = (call.arg_node(SAMPLER_AT[name], name) for name in ("num_replicas", "rank"))
    if count is not None and count.origin == {"rank"} and (rank is None or "world_size" in rank.origin):
        return (
            "error",
            "num_replicas",
            f"num_replicas gets the rank (`{text_of(count_node)}`) and rank the number of ranks",
        )
    if isinstance(count_node, ast.Constant) and count_node.value == 1:
        return "error", "num_replicas", "num_replicas=1 gives all samples to each rank: nothing is split"
    if isinstance(rank_node, ast.Constant) and isinstance(rank_node.value, int):
        return (
            "error",
            "rank",
            f"each rank takes the samples of rank {rank_node.value}, and those of the others are never used",
        )
    if rank is not None and rank.origin == {"local_rank"} and (count is None or "world_size" in count.origin):
        return (
            "warning",
            "rank",
            f"`{text_of(rank_node)}` is the local rank: with two nodes, both take the same samples and skip the others",
        )
    return None


_FIX = "omit rank and num_replicas, or pass rank=dist.get_rank() and num_replicas=dist.get_world_size()"
_OWN = frozenset({"time", "own", "host", "random"})


@rule("RW507", "error", "X4", "the seed or the epoch of a DistributedSampler differs between ranks")
def sampler_seed_differs(script: Script) -> Iterator[Found]:
    for place in once(places(script, SAMPLER, f"{SAMPLER}.set_epoch")):
        call = place.last
        is_made = call.name == SAMPLER
        value = call.arg(SAMPLER_AT["seed"], "seed") if is_made else call.arg(0, "epoch")
        node = call.arg_node(SAMPLER_AT["seed"], "seed") if is_made else call.arg_node(0, "epoch")
        if value is None or not place.is_made_by_all or call.guards or not _is_own(script, place, value):
            continue
        word = "seed" if is_made else "epoch"
        message = f"`{text_of(node)}` differs between ranks, so each takes its share of another order: shares overlap, and samples are missed"
        yield Found(node or call.node, message, f"use the same {word} on all ranks")


def _is_own(script: Script, place: Place, value: Value) -> bool:
    if "loaded" in value.origin:
        return False  # files of several names may hold the same
    if value.origin & {"rank", "local_rank", "node_rank"}:
        return bool(value.spread)
    if not value.origin & _OWN or not value.spread:
        return False
    # Where mp.spawn starts the ranks, a clock that was read before is the same for all of them.
    drawn = [
        call for history in place.entry.histories for call in history.calls if call.result.origin & value.origin & _OWN
    ]
    return not is_spawned(place.last) or any(
        is_spawned(call)
        and is_in_ranks(script, place.entry, call)
        and call.index < place.last.index
        and call.name != SAMPLER
        for call in drawn
    )
