"""The rank is read before the process group exists, or the group is created while it does."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import (
    INIT,
    above,
    called_names,
    function_of,
    is_hidden,
    is_sequence,
    line_of,
    node_in,
    ops,
    starts_group,
    statement_of,
    text_of,
)
from rankwise.lint.analyses.turns import frames_of, is_caught, is_made_anyway
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.looping import turns_of
from rankwise.lint.interpreter.special import PROCESS
from rankwise.lint.interpreter.values import arms_of
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call
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
        if not early:
            yield from _without_group(script, entry)


def _without_group(script: Script, entry: Entry) -> Iterator[Found]:
    """What needs the process group, before this process creates it, or in the parent of the processes that do."""
    calls = entry.histories[0].calls
    inits = [one for one in calls if starts_group(one)]
    has_parent = entry.is_program and any("spawned" in one.contexts for one in inits)
    needs = {id(op.call) for op in ops(entry.histories[0].items) if op.is_sure}
    for call in calls:
        is_end = call.name == "torch.distributed.destroy_process_group"
        is_use = id(call) in needs and call.name.startswith("torch.distributed.")
        at = node_in(script, call) if is_end or is_use else None
        mine = [one for one in inits if _same_process(one, call) and not one.excludes(call)]
        if at is None or is_caught(script.tree, at) or any(one.index < call.index for one in mine):
            continue
        sure = [one for one in mine if not one.tests and is_sequence(entry, one, call) and is_made_anyway(one)]
        if sure and is_use:
            where, fix = (
                f"before the process group is created{_where(script, sure[0])}",
                "create the process group first",
            )
        elif is_end and has_parent and not mine and is_made_anyway(call) and not _has_test(call):
            where, fix = "in the process that starts the ranks, which has no process group", "call it in each rank"
        else:
            continue
        yield Found(at, f"`{text_of(at)}` is called {where}: it raises", fix)
        return


def _has_test(call: Call) -> bool:
    """Whether the script asks for a group around it, as by `if dist.is_initialized()`, which is False in the parent."""
    return any(
        isinstance(one, (ast.If, ast.IfExp, ast.BoolOp)) and "is_initialized" in called_names(one)
        for module, node in frames_of(call)
        for one in above(module.tree, node)
    )


def _same_process(init: Call, call: Call) -> bool:
    mine, others = ([name for name in one.contexts if name.startswith((PROCESS, "spawned"))] for one in (init, call))
    return mine == others


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
    statement = statement_of(script.tree, at)
    is_talk = (
        isinstance(statement, ast.If) and set().union(*(called_names(one) for one in statement.body)) <= _ONLY_TALK
    )
    shown = text_of(at if isinstance(at, ast.expr) else None) or "this"
    return Found(
        at,
        f"`{shown}` is called before the process group is created{_where(script, init)}: every rank thinks it is rank 0 here",
        "create the process group first, or read int(os.environ['RANK'])",
        severity="warning" if is_talk else "error",
    )


def _where(script: Script, call: Call) -> str:
    return f" on line {line_of(call)}" if call.module is script.module else f" in {call.module.shown}"


#: What such a name may also do: destroy the group.
_MAY_DESTROY = re.compile("destroy|clean|clos|end_|tear|shut|final|stop|reset|exit")
#: Decorators behind which a function runs each time that it is called.
_PLAIN = frozenset({"record", "main", "no_grad", "inference_mode", "staticmethod", "classmethod"})


@rule("RW211", "error", "I16", "the process group is created again while it exists")
def init_twice(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        for call, first in _again(entry):
            at = node_in(script, call) if entry.is_program or call.module is script.module else None
            if at is not None:
                why = (
                    f"the process group created{_where(script, first)} still exists"
                    if first.node is not call.node
                    else "each iteration of the loop creates the process group, and nothing destroys it in between"
                )
                yield Found(
                    at,
                    f"{why}: `ValueError: trying to initialize the default process group twice!`",
                    "create it once, before all that needs it, or call dist.destroy_process_group() in between",
                )


def _again(entry: Entry) -> Iterator[tuple[Call, Call]]:
    """Calls that create the group although an earlier one, or the same in the turn before, surely has."""
    calls = entry.histories[0].calls
    held: Call | None = None
    for call in calls:
        if _may_destroy(call):
            held = None
        elif call.name == INIT and _runs_each_time(call):
            if held is not None and _comes_to_both(entry, held, call):
                yield call, held
            elif call.loops and not call.tests and _goes_on(entry, call.loops[-1]):
                inside = (one for one in calls if call.loops[-1] in one.loops)
                if not any(map(_may_destroy, inside)):
                    yield call, call
            held = call


def _comes_to_both(entry: Entry, one: Call, other: Call) -> bool:
    return _same_process(one, other) and is_sequence(entry, one, other) and arms_of(one.tests) == arms_of(other.tests)


def _may_destroy(call: Call) -> bool:
    return is_hidden(call) or _MAY_DESTROY.search(call.name.rpartition(".")[2]) is not None


def _runs_each_time(call: Call) -> bool:
    """Whether a call is made again each time that the program comes there: no cache or singleton stands above it."""
    for one in (one for module, node in frames_of(call) for one in above(module.tree, node)):
        if isinstance(one, ast.ClassDef) and (one.bases or one.keywords or one.decorator_list):
            return False
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            marks = {text_of(getattr(mark, "func", mark)).rpartition(".")[2] for mark in one.decorator_list}
            if not marks <= _PLAIN:
                return False
    return is_made_anyway(call)


def _goes_on(entry: Entry, node: ast.AST) -> bool:
    """Whether a loop makes several whole turns: nothing in it ends it or leaves a part out, nor a test as that of a `while`."""
    leaves = (ast.Break, ast.Continue, ast.Return, ast.Raise)
    turns = {turns_of(loop.value) for _, loop in entry.histories[0].loops if loop.node is node}
    is_whole = isinstance(node, ast.For) and not any(isinstance(one, leaves) for one in ast.walk(node))
    return is_whole and turns.isdisjoint({0, 1})
