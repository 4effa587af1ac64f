"""The process group is used before it exists."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import (
    INIT,
    above,
    called_names,
    function_of,
    has_unread,
    is_hidden,
    is_sequence,
    line_of,
    node_in,
    starts_group,
    statement_of,
    text_of,
)
from rankwise.lint.analyses.turns import is_caught
from rankwise.lint.finding import Found
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.names import DDP, FSDP, SAMPLER
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.script import Entry, Script

_ASKS = "torch.distributed.is_initialized"
#: Functions that return the answer.
_DEEPEST = 3
_ONLY_TALK = frozenset(
    {"print", "info", "warning", "debug", "log", "write", "setLevel", "basicConfig", "join", "format"}
)


@rule("RW205", "error", "I25", "the rank is read before the process group exists")
def rank_asked_before_init(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        calls = entry.histories[0].calls
        early = [call for call in calls if call.name == _ASKS and "before_init" in call.result.origin]
        for call in early:
            inits = (one for one in calls[call.index :] if starts_group(one) and _same_process(one, call))
            later = next((one for one in inits if is_sequence(entry, one, call)), None)
            at = _use(script, call) if later is not None and _stands_for_rank(call, later) else None
            if later is not None and at is not None:
                yield _tell(script, at, later)


def _same_process(init: Call, call: Call) -> bool:
    return ("spawned" in init.contexts) == ("spawned" in call.contexts)


def _stands_for_rank(call: Call, init: Call) -> bool:
    """Whether the test, or the function around it that gives the answer on, chooses between the rank and a substitute for it."""
    frames = [(call.module, call.node, call.stack)]
    frames += [(site.module, site.node, call.stack[:depth]) for depth, site in enumerate(call.stack)][::-1]
    for module, node, stack in frames[:_DEEPEST]:
        for one in above(module.tree, node):
            is_test = isinstance(one, (ast.IfExp, ast.BoolOp)) or (
                isinstance(one, ast.If) and node in set(ast.walk(one.test))
            )
            is_function = isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
            names = called_names(one) if is_test or is_function else set[str]()
            if "get_rank" in names:
                makes = any("init" in name and "initialized" not in name for name in names)
                return not makes and not (is_function and stack and init.stack[: len(stack)] == stack)
            if is_function:
                break
    return False


def _use(script: Script, call: Call) -> ast.AST | None:
    """The place in this file where the answer is used, past all functions that only return it."""
    node, module = call.node, call.module
    for site in call.stack[::-1]:
        around = function_of(module.tree, node)
        if not any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(around)):
            break
        node, module = site.node, site.module
    return node if module is script.module else None


def _tell(script: Script, at: ast.AST, init: Call) -> Found:
    where = f" on line {line_of(init)}" if init.module is script.module else f" in {init.module.shown}"
    statement = statement_of(script.tree, at)
    is_talk = (
        isinstance(statement, ast.If) and set().union(*(called_names(one) for one in statement.body)) <= _ONLY_TALK
    )
    shown = text_of(at if isinstance(at, ast.expr) else None) or "this"
    return Found(
        at,
        f"`{shown}` is called before the process group is created{where}: every rank thinks it is rank 0 here",
        "create the process group first, or read int(os.environ['RANK'])",
        severity="warning" if is_talk else "error",
    )


_COLLECTIVES = {name for name, act in ACTS.items() if act.signature} | {
    f"torch.distributed.{name}" for name in ("new_group", "get_rank", "get_world_size")
}
#: Packages whose objects make the group when they are made, or when they train.
_FRAMEWORKS = frozenset({"transformers", "accelerate", "rankwise"})


@rule("RW212", "error", "I15", "something needs the process group before it exists")
def used_before_init(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        for call, message in _entry(script, entry):
            at = node_in(script, call) if entry.is_program or call.module is script.module else None
            if at is not None:
                yield Found(at, message, "call dist.init_process_group before it")


def _entry(script: Script, entry: Entry) -> Iterator[tuple[Call, str]]:
    calls = entry.histories[0].calls
    inits = [call for call in calls if starts_group(call)]
    if not inits:
        yield from _never(script, entry)
        return
    first = inits[0]
    if first.name != INIT or any(map(is_hidden, calls[: first.index])):
        return
    for call in calls:
        what = _needs_group(call)
        if (
            what is None
            or not is_sequence(entry, call, first)
            or _is_tested(calls, call)
            or not _same_process(call, first)
        ):
            continue
        if call.index < first.index and not _in_own_loop(call, first):
            yield (
                call,
                f"{what} needs the process group, which is created only later, on line {line_of(first)}: it raises ValueError",
            )
        elif call.index > first.index and len(inits) == 1 and _is_optional(first) and entry.is_program:
            test = text_of(first.tests[-1][0])
            yield (
                call,
                f"{what} also runs where `{test}` is false, and then there is no process group: it raises ValueError",
            )


def _never(script: Script, entry: Entry) -> Iterator[tuple[Call, str]]:
    """A whole program that never creates a group, and calls nothing that may."""
    calls = entry.histories[0].calls
    if not entry.is_program or script.piece.is_fragment or any(map(_may_start, calls)) or has_unread(script, calls):
        return
    for call in calls:
        what = _needs_group(call)
        if what is not None and not _is_tested(calls, call):
            yield (
                call,
                f"{what} needs the process group, and this program never creates one: it raises ValueError",
            )
            return


def _may_start(call: Call) -> bool:
    return is_hidden(call) or call.name.partition(".")[0] in _FRAMEWORKS


def _needs_group(call: Call) -> str | None:
    last = call.name.rpartition(".")[2]
    if call.name in _COLLECTIVES:
        return f"dist.{last}"
    if call.name in {DDP, FSDP}:
        return last
    if (
        call.name == SAMPLER
        and not call.has_star
        and (call.arg(1, "num_replicas") is None or call.arg(2, "rank") is None)
    ):
        return last
    return None


def _is_tested(calls: list[Call], call: Call) -> bool:
    """Whether a test encloses it, an exception is taken care of, or its function has asked for the group before."""
    if call.tests or call.guards or is_caught(call.module.tree, call.node):
        return True
    around = set(
        ast.walk(getattr(call.function, "node", None) or statement_of(call.module.tree, call.node) or call.node)
    )
    asked = (one for one in calls[: call.index] if one.name == _ASKS)
    return any(not around.isdisjoint({one.node, *(site.node for site in one.stack)}) for one in asked)


def _in_own_loop(call: Call, init: Call) -> bool:
    return bool(call.loops) and bool(init.loops) and call.loops[0] is init.loops[0]


def _is_optional(init: Call) -> bool:
    """Whether the group is created only where an option of this name is on."""
    return bool(init.tests) and init.tests[-1][2] is True and isinstance(init.tests[-1][0], (ast.Name, ast.Attribute))
