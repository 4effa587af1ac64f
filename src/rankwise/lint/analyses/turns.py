"""Work that ranks of a node must do one after the other: whether a script sees to it at a call."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import above, function_of, is_hidden, text_of
from rankwise.lint.analyses.saved_files import position_of
from rankwise.lint.analyses.tensors import sources_of
from rankwise.lint.interpreter.values import ANY
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.constructor_table import WRAPPERS

if TYPE_CHECKING:
    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.program import Module


def is_barrier(call: Call) -> bool:
    """Whether ranks wait for each other at a call, or may where its text is not at hand."""
    waits = call.name in ACTS and bool(ACTS[call.name].family)
    return waits or call.name in WRAPPERS or call.name.endswith(".prepare") or is_hidden(call)


def takes_turns(place: Place) -> bool:
    """Whether the script orders the ranks at a place, or may: by a lock, `main_process_first`, a barrier for all but the first rank."""
    before = (other for history in place.entry.histories for other in history.calls if other.guards)
    return "ordered" in place.last.contexts or any(
        other.name.endswith(("barrier", "wait_for_everyone")) for other in before
    )


def was_done_before(place: Place) -> bool:
    """Whether the first rank, or the process that starts the ranks, has done the same before."""
    first = place.calls[0]
    for call in place.entry.histories[0].calls[: first.index]:
        if (
            call.name == first.name
            and call.node is not first.node
            and not _is_elsewhere(call, first)
            and (call.guards or ("spawned" in first.contexts and "spawned" not in call.contexts))
        ):
            return True
    return False


def _is_elsewhere(one: Call, other: Call) -> bool:
    """Whether two calls are about other files: their paths have no setting in common."""
    at = position_of(one)
    mine, its = (
        {source.path for source in sources_of((call.arg(*at) if at else None) or ANY, cuts=False) if source.path}
        for call in (one, other)
    )
    return bool(mine and its) and mine.isdisjoint(its)


_EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit"})


def is_caught(tree: ast.Module, node: ast.AST) -> bool:
    """Whether an exception is taken care of, or expected, where a node stands."""
    inner = node
    for one in above(tree, node):
        if isinstance(one, ast.Try) and any(inner is part for part in one.body) and any(map(_goes_on, one.handlers)):
            return True
        if isinstance(one, (ast.With, ast.AsyncWith)) and expects_error(one):
            return True
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        inner = one
    return False


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the program does, after an exception: a handler may end in raising it again, or in ending the process."""
    last = handler.body[-1]
    is_exit = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in _EXITS
    return not is_exit and not isinstance(last, ast.Raise)


def frames_of(call: Call) -> list[tuple[Module, ast.AST]]:
    """A call, and the places from which the functions were called that led to it, outermost last."""
    return [(call.module, call.node), *((site.module, site.node) for site in reversed(call.stack))]


def is_made_anyway(call: Call) -> bool:
    """Whether nothing around a call, or before it in a function that led to it, may leave it out or catch its error."""
    return not any(is_caught(module.tree, node) or _may_leave_before(module, node) for module, node in frames_of(call))


def _may_leave_before(module: Module, node: ast.AST) -> bool:
    around, line = function_of(module.tree, node), getattr(node, "lineno", 0)
    if isinstance(around, ast.Module):
        around = next((one for one in around.body if one.lineno <= line <= (one.end_lineno or 0)), around)
    leaves = (ast.Return, ast.Continue, ast.Break)
    return any(isinstance(one, leaves) and one.lineno < line for one in ast.walk(around))


def expects_error(block: ast.With | ast.AsyncWith) -> bool:
    """Whether a block says that an exception may come: ``pytest.raises``, ``contextlib.suppress``."""
    contexts = " ".join(text_of(item.context_expr) for item in block.items)
    return any(word in contexts.lower() for word in ("suppress", "raises", "warn"))
