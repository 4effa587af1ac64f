"""Work that ranks of a node must do one after the other: whether a script sees to it at a call."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from rankwise.lint.topics.job_view import above, is_hidden, text_of

if TYPE_CHECKING:
    from rankwise.lint.model.calls import Call
    from rankwise.lint.topics.job_view import Place

_IN_TURN = re.compile(r"first|lock|barrier|only|main|master|zero|once", re.IGNORECASE)
_WHO = re.compile(r"main|master|\brank|_rank|rank_|local|chief|primary|leader|zero", re.IGNORECASE)
_SYNCS = frozenset({"barrier", "monitored_barrier", "wait_for_everyone", "all_reduce", "broadcast", "broadcast_object_list", "all_gather",
                    "all_gather_object", "reduce", "DistributedDataParallel", "synchronize", "prepare"})  # fmt: skip


def is_barrier(call: Call) -> bool:
    """Whether ranks wait for each other at a call, or may where its text is not at hand."""
    last = call.name.rpartition(".")[2].lstrip("?")
    return last in _SYNCS or "barrier" in last or is_hidden(call)


def takes_turns(place: Place) -> bool:
    """Whether the script orders the ranks at a place: a lock, `main_process_first`, or a barrier for all but the first rank."""
    call = place.last
    if any(_IN_TURN.search(context) for context in call.contexts):
        return True
    if any(_WHO.search(text_of(test)) for test, _value, _arm in call.tests):
        return True
    for history in place.entry.histories:
        for other in history.calls:
            last = other.name.rpartition(".")[2]
            if other.guards and ("barrier" in last or last == "wait_for_everyone"):
                return True
    return False


def was_done_before(place: Place) -> bool:
    """Whether the first rank, or the process that starts the ranks, has done the same before."""
    first = place.calls[0]
    for call in place.entry.histories[0].calls[: first.index]:
        if (
            call.name == first.name
            and call.node is not first.node
            and (call.guards or ("spawned" in first.contexts and "spawned" not in call.contexts))
        ):
            return True
    return False


def is_caught(tree: ast.AST, node: ast.AST) -> bool:
    """Whether an exception is taken care of, or expected, where a node stands."""
    inner = node
    for one in above(tree, node):
        if isinstance(one, ast.Try) and any(inner is part for part in one.body) and one.handlers:
            return True
        if isinstance(one, (ast.With, ast.AsyncWith)) and any(
            word in text_of(item.context_expr)
            for item in one.items
            for word in ("suppress", "raises", "warn")
        ):
            return True
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        inner = one
    return False
