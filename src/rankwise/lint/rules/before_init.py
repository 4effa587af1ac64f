"""The rank is read before the process group exists."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import (
    above,
    called_names,
    function_of,
    is_sequence,
    line_of,
    starts_group,
    statement_of,
    text_of,
)
from rankwise.lint.finding import Found
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.script import Script

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
