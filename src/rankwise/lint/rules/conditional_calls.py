"""Something that all ranks must call together is called by some of them."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import in_step
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.history import Op
from rankwise.lint.library.names import ACCELERATOR, DDP, ENGINE
from rankwise.lint.paths.found import all_divergences, all_local_paths, all_ops, missed_ops
from rankwise.lint.paths.phrases import also, anchor, called, line_left, reported_place, tested, who, written
from rankwise.lint.paths.reasons import test_of
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.paths.found import Missed
    from rankwise.lint.script import Script

#: Calls that write their result into a tensor or list that they were given.
_FILLING = ("all_gather", "all_reduce", "all_to_all", "gather", "reduce", "scatter")


def _reported(one: Missed, what: str, fix: str, verb: str = "reach", failure_class: str | None = None) -> Found:
    """What is wrong with an op that some ranks never come to; where an early exit keeps them away, it can go before that."""
    op, guard = one.op, one.guard
    line = line_left(op, guard)
    return Found(
        one.at,
        f"{who(one.doers, one.others, verb)} {_shown(op)} (`{tested(op, guard)}`){what}",
        f"call {called(op)} before line {line}, or let every rank reach it" if line and verb == "reach" else fix,
        severity="error" if one.is_sure else "warning",
        failure_class=failure_class,
        also=also(op, one.at, guard),
    )


def _shown(op: Op) -> str:
    return called(op).removesuffix("()") if op.family == "forward" else called(op)


@rule("RW101", "error", "C1 C27", "only some ranks reach a collective")
def collective_under_rank_test(script: Script) -> Iterator[Found]:
    for one in missed_ops(script, "collective"):
        name = called(one.op)
        is_alone = isinstance(scopes_of(script.tree).parents.get(one.op.call.node), ast.Expr)
        is_needless = is_alone and not one.op.call.name.rpartition(".")[2].startswith(_FILLING)
        fix = "outside the test" if is_needless else "and keep only the use of its result under the test"
        yield _reported(
            one, ": it waits for the others, or pairs with their next collective", f"call {name} on every rank, {fix}"
        )


@rule("RW102", "error", "C2 C1", "some ranks call one more barrier than others")
def unbalanced_barrier(script: Script) -> Iterator[Found]:
    num_barriers = sum(call.name.endswith((".barrier", ".wait_for_everyone")) for call in script.calls)
    for one in missed_ops(script, "barrier"):
        name, fix = called(one.op), f"move {called(one.op)} out of the test: every rank must call it"
        for others, words, test in (((0,), "rank 0", "rank"), ((0, 2), "local rank 0", "local_rank")):
            if tuple(one.others) == others:
                fix = f"let {words} call {name} too, after what it does first: `if {test} == 0: {name}`"
        # One half of "rank 0 first": a barrier for the others, and more barriers in the file.
        is_half = num_barriers > 1 and 0 in one.others
        what = ": it waits until the others call one more barrier, and every later one is off by one"
        yield _reported(one, what, fix, failure_class="C2" if is_half else "C1")


@rule("RW104", "error", "D17 D18 C1", "only some ranks run a model that is distributed over all")
def forward_on_some_ranks(script: Script) -> Iterator[Found]:
    for one in missed_ops(script, "forward"):
        model, is_ddp = _shown(one.op), getattr(one.op.call.receiver.thing, "kind", "") == DDP
        is_open = one.op.call.name.startswith(ENGINE) and not one.is_sure
        why = "broadcasts its buffers" if is_ddp else f"gathers its shards{' in ZeRO stage 3' if is_open else ''}"
        fix = (
            f"evaluate with {model}.module on this rank, or let every rank evaluate"
            if is_ddp
            else f"let every rank run {model}"
        )
        yield _reported(one, f", which is distributed over all ranks: each forward pass {why}", fix, "run")


#: Arguments by which Accelerate shards a model.
_SHARDS = {
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
}


@rule("RW105", "error", "D28 K6", "only some ranks gather or save a state that is distributed over all ranks")
def state_on_some_ranks(script: Script) -> Iterator[Found]:
    for one in missed_ops(script, "state", "save"):
        is_save, does = (
            one.op.family == "save",
            "loads" if "load" in one.op.call.name.rpartition(".")[2] else "writes",
        )
        fix = f": it {does} with all of them" if is_save else ", and let rank 0 alone write what it returns"
        maker = getattr(one.op.call.receiver.thing, "call", None)
        # Of Accelerate's, the command that starts the ranks decides whether there are shards to wait for.
        is_sharded = not _SHARDS.isdisjoint(getattr(maker, "kwargs", ()))
        is_open = one.op.call.name.startswith(ACCELERATOR) and not one.is_sure and not is_sharded
        when = " with FSDP or DeepSpeed" if is_open else ""
        found = _reported(
            one,
            f", which{when} all ranks must call together: it waits for the others",
            f"call {called(one.op)} on every rank{fix}",
            failure_class="K6" if is_save else "D28",
        )
        yield replace(found, severity="hint") if is_open else found


@rule("RW106", "error", "C27 D14 C1", "only some ranks run the backward pass of a wrapped model")
def backward_on_some_ranks(script: Script) -> Iterator[Found]:
    for one in missed_ops(script, "backward"):
        what = ", where gradients are averaged over all ranks: it waits for the others"
        yield _reported(one, what, "make every rank run the same number of backward passes")


#: `self` or a cache may keep groups that all ranks created before.
_CACHE = re.compile(r"\bin (self\.|\w*cache)")


@rule("RW107", "error", "C10 D13", "only some ranks wrap the model or create a group")
def made_on_some_ranks(script: Script) -> Iterator[Found]:
    for one in missed_ops(script, "wrap", "group"):
        is_group = one.op.family == "group"
        what, fix = (", members or not", ", and use the group on its members only") if is_group else ("", "")
        yield _reported(
            one,
            f", which every rank must call{what}",
            f"call {called(one.op)} on every rank{fix}",
            failure_class="C10" if is_group else "D13",
        )
    for path in all_local_paths(script):  # `if rank not in ranks: continue` before new_group
        if path.op.family == "group" and path.kind in {"leave", "arm"} and "member" in path.item.value.origin:
            test, name = test_of(path.item.node), called(path.op)
            yield Found(
                test,
                f"ranks for which `{written(test)}` differs do not all reach {name}, which every rank must call, members or not",
                f"call {name} for every group on every rank, and keep the one that this rank is in",
                severity="warning" if _CACHE.search(ast.unparse(test)) else "error",
                failure_class="C10",
                also=[reported_place(f"{name} is here", path.op.call.node, path.op.call.module)],
            )


_ON_TENSORS = frozenset(f"torch.distributed.{word}" for word in ("all_reduce", "broadcast", "reduce"))


@rule("RW103", "error", "C8 C1 C3 D17 D28", "branches of a test on the rank call different collectives")
def other_collective_in_arm(script: Script) -> Iterator[Found]:
    reported: set[frozenset[int]] = set()
    for one in all_divergences(script):
        op, instead = one.item, one.instead
        if not isinstance(op, Op) or instead is None or one.guard is None:
            continue
        pair = frozenset({id(op.call.node), id(instead.call.node)})
        at = anchor(op, one.guard, script)
        if at is None or pair in reported:
            continue
        reported.add(pair)
        yield Found(
            at[0],
            f"{who(one.doers, one.others, 'reach')} {called(op)} (`{tested(op, one.guard)}`), and the others {called(instead)}:"
            " the two pair, which hangs, crashes or gives wrong numbers",
            f"let every rank call {called(op)} and {called(instead)} in the same order",
            severity="error" if op.is_sure and instead.is_sure else "warning",
            failure_class=_class(op, instead),
            also=also(op, at[0], one.guard, instead),
        )
    yield from _crossed(script)


def _crossed(script: Script) -> Iterator[Found]:
    """The same collectives on the same tensors in both branches, in another order: silent sums of different tensors."""
    for steps in in_step(script, *_ON_TENSORS):
        ways = [sorted((call.name, _tensor(call)) for call in own) for own in zip(*steps, strict=True)]
        if ways.count(ways[0]) < len(ways):
            continue  # tensors of other names may be meant for each other
        for one, *others in steps:
            other = next((call for call in others if _tensor(call) != _tensor(one)), one)
            if other.name == one.name and other is not one and other.guards and not other.loops:
                yield Found(
                    other.node,
                    f"ranks with `{written(other.guards[-1].node)}` reduce `{_tensor(other)}` where the others reduce `{_tensor(one)}`: the two are summed without an error",
                    "use the same order on all ranks",
                    failure_class="C3",
                )
                break


def _tensor(call: Call) -> str:
    return written(call.arg_node(0, "tensor"))


def _class(op: Op, instead: Op) -> str:
    families = {op.family, instead.family}
    if "forward" in families:
        return "D17"
    if "state" in families:
        return "D28"
    return "C1" if "barrier" in families else "C8"


_FIRST = frozenset({"main_process_first", "local_main_process_first", "rank_zero_first"})


@rule("RW110", "error", "C1", "a collective inside main_process_first()")
def collective_in_main_first(script: Script) -> Iterator[Found]:
    for op in all_ops(script):
        if not _FIRST.isdisjoint(op.call.contexts):
            at = anchor(op, None, script)
            if at is not None:
                yield Found(
                    op.call.node if op.call.module is script.module else at[0],
                    f"{called(op)} is in a block that the main process runs first: it waits for the others, and they wait for it",
                    f"move {called(op)} after the block",
                )
