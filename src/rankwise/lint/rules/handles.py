"""Sends, receives, and collectives that only start."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.finding import Found
from rankwise.lint.model.values import Items, Object, Spread, mixed
from rankwise.lint.rule import rule
from rankwise.lint.topics.collective_calls import FILLED, D, collectives, filled_node, ranks_in, word_of
from rankwise.lint.topics.job_view import (
    function_of,
    is_distributed,
    once,
    parents_of,
    places,
    statement_of,
    text_of,
)
from rankwise.lint.topics.tensor_text import is_behind, key_of, loads, nodes_in, root_of, targets_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script
    from rankwise.lint.topics.job_view import Place


_FILLS = frozenset({"append", "clear", "extend", "insert"})


_QUIET = frozenset(
    {
        "shape",
        "size",
        "device",
        "dtype",
        "numel",
        "dim",
        "record_stream",
        "data_ptr",
        "element_size",
        "is_cuda",
        "nelement",
    }
)


@rule("RW306", "error", "C12", "an asynchronous collective is never waited for")
def handle_never_waited_for(script: Script) -> Iterator[Found]:
    for place in collectives(script, *FILLED, "isend"):
        call = place.last
        if (
            not _is_async(call)
            or _synchronizes(script.tree, call.node)
            or "_coalescing_manager" in call.contexts
        ):
            continue
        told = _told(script.tree, call)
        if told is None:
            continue
        node, what = told
        name = key_of(root_of(filled_node(call))) if word_of(call) in FILLED else ""
        tensor = f"`{name}`" if name else "its tensor"
        yield Found(
            node,
            f"{word_of(call)} only starts here, {what}; {tensor} may hold the old value, the new one or a mixture",
            _fix(script.tree, call, tensor),
            severity="warning"
            if word_of(call) == "isend" or _has_barrier(script.tree, call.node)
            else "error",
        )


def _fix(tree: ast.Module, call: Call, tensor: str) -> str:
    holder = _holder(tree, call.node)
    if not holder:
        return f"keep the handle and call its `wait()` before {tensor} is read or changed"
    if isinstance(parents_of(tree).get(call.node), ast.Assign):
        return f"call `{holder}.wait()` before {tensor} is read or changed"
    return f"call `wait()` on each handle in `{holder}` before {tensor} is read or changed"


def _is_async(call: Call) -> bool:
    if word_of(call) in {"irecv", "isend"}:
        return True
    given = call.kwargs.get("async_op")
    return given is not None and given.const is True


def _synchronizes(tree: ast.Module, node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Call)
        and key_of(one.func).endswith(("cuda.synchronize", "wait_stream"))
        and is_behind(one, node)
        for one in nodes_in(function_of(tree, node))
    )


def _has_barrier(tree: ast.Module, node: ast.AST) -> bool:
    """Whether a barrier follows: on one stream of a GPU, nothing is left to wait for after it."""
    return any(
        isinstance(one, ast.Call) and key_of(one.func).endswith("barrier") and is_behind(one, node)
        for one in nodes_in(function_of(tree, node))
    )


def _told(tree: ast.Module, call: Call) -> tuple[ast.AST, str] | None:
    parents = parents_of(tree)
    parent, statement = parents.get(call.node), statement_of(tree, call.node)
    if isinstance(parent, ast.Expr):
        return call.node, "and its handle is discarded, so nothing can wait for it"
    holder = _holder(tree, call.node)
    if not holder or statement is None:
        return None
    around: ast.AST = function_of(tree, call.node)
    if "." in holder:
        if not holder.startswith("self."):
            return None  # an object that others may hold too
        last = holder.rpartition(".")[2]
        reads: list[ast.AST] = [
            one
            for one in ast.walk(tree)
            if isinstance(one, ast.Attribute) and one.attr == last and isinstance(one.ctx, ast.Load)
        ]
    else:
        reads = loads(list(ast.walk(around)), holder)
    used = [one for one in reads if not _only_fills(parents, one)]
    if not used:
        return call.node, f"and nothing ever waits for `{holder}`"
    return _too_early(tree, call, holder, used, statement)


def _holder(tree: ast.Module, node: ast.AST) -> str:
    """The variable or list that the handle goes to."""
    parents = parents_of(tree)
    parent = parents.get(node)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return key_of(parent.targets[0])
    if (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Attribute)
        and parent.func.attr == "append"
    ):
        return key_of(parent.func.value) if isinstance(parents.get(parent), ast.Expr) else ""
    if isinstance(parent, ast.ListComp) and parent.elt is node:
        above_it = parents.get(parent)
        if isinstance(above_it, ast.Assign):
            return key_of(above_it.targets[0])
    return ""


def _only_fills(parents: dict[ast.AST, ast.AST], read: ast.AST) -> bool:
    parent = parents.get(read)
    if isinstance(parent, ast.Attribute) and parent.attr in _FILLS:
        return True
    return isinstance(parent, ast.Call) and key_of(parent.func) == "len"


def _too_early(
    tree: ast.Module, call: Call, holder: str, used: list[ast.AST], statement: ast.stmt
) -> tuple[ast.AST, str] | None:
    """A read of the tensor between the call and the first use of a handle that is a plain variable."""
    key = key_of(root_of(filled_node(call))) if word_of(call) in FILLED else ""
    if not key or "." in holder or not isinstance(statement, ast.Assign) or statement.value is not call.node:
        return None
    behind = [one for one in used if is_behind(one, call.node)]
    block = _block(tree, statement)
    if not behind or not block:
        return None
    first = min(behind, key=lambda one: (one.lineno, one.col_offset))  # type: ignore[attr-defined]
    for one in block:
        if one is statement or not is_behind(one, statement):
            continue
        if (
            is_behind(one, first)
            or first in set(ast.walk(one))
            or any(key_of(target) == key for target in targets_of(one))
        ):
            return None
        for read in loads(list(ast.walk(one)), key):
            parent = parents_of(tree).get(read)
            if not (isinstance(parent, ast.Attribute) and parent.attr in _QUIET) and not _is_collective(
                tree, read
            ):
                return (
                    read,
                    f"`{holder}` is waited for only on line {getattr(first, 'lineno', 0)}, and its tensor is read before that",
                )
    return None


def _block(tree: ast.Module, statement: ast.stmt) -> list[ast.stmt]:
    parent = parents_of(tree).get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return block
    return []


def _is_collective(tree: ast.Module, read: ast.AST) -> bool:
    parent = parents_of(tree).get(read)
    return isinstance(parent, ast.Call) and any(word.arg == "async_op" for word in parent.keywords)


_POINTS = frozenset(
    D + word
    for word in (
        "send",
        "recv",
        "isend",
        "irecv",
        "batch_isend_irecv",
        "send_object_list",
        "recv_object_list",
    )
)


_SENDS, _RECEIVES = frozenset({"send", "send_object_list"}), frozenset({"recv", "recv_object_list"})


@rule("RW313", "error", "C9", "all ranks send before they receive, or receive before they send")
def all_send_first(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        firsts = _firsts(entry)
        if len(firsts) < 4 or not is_distributed(entry):
            continue
        words = {word_of(one[0]) for one in firsts}
        here = firsts[0][0]
        if here.module is not script.module or any(one[0].tests for one in firsts):
            continue
        if words <= _SENDS and all(_then(calls, _RECEIVES) for calls in firsts):
            yield _finding(here, "send", "receives")
        elif words <= _RECEIVES and all(_then(calls, _SENDS) for calls in firsts):
            yield _finding(here, "recv", "sends")


def _firsts(entry: Entry) -> list[list[Call]]:
    found = [[call for call in history.calls if call.name in _POINTS] for history in entry.histories]
    return found if all(found) else []


def _then(calls: list[Call], words: frozenset[str]) -> bool:
    return any(word_of(one) in words for one in calls[1:])


def _finding(call: Call, word: str, later: str) -> Found:
    return Found(
        call.node,
        f"every rank blocks in this {word} before it {later}, so no rank ever reaches what its peer waits for",
        "use `request = dist.isend(...)`, then `recv`, then `request.wait()`; or let even ranks send first and odd ranks receive first",
    )


_WHO = frozenset({"rank", "local_rank", "node_rank"})


@rule("RW314", "error", "C10", "ranks create different groups at the same place")
def group_differs_between_ranks(script: Script) -> Iterator[Found]:
    for place in once(places(script, D + "new_group")):
        call = place.last
        local = call.kwargs.get("use_local_synchronization")
        if local is not None and local.const is not False:
            continue
        node = call.arg_node(0, "ranks")
        if node is None or len(place.calls) < 2 or not _differs(place):
            continue
        yield Found(
            node,
            f"each rank creates another group here, `{text_of(node)}`, but every rank must create all groups, in the same order",
            "create all groups on every rank in one loop, and keep the one with this rank in it; or use `dist.new_subgroups_by_enumeration`",
        )


def _differs(place: Place) -> bool:
    lists = [ranks_in(call.arg(0, "ranks")) for call in place.calls]
    if all(one is not None for one in lists):
        # A group of one needs no other rank.
        return len(set(lists)) > 1 and any(len(one or ()) > 1 for one in lists)
    value = place.last.arg(0, "ranks")
    loops, node = place.last.loops, place.last.arg_node(0, "ranks")
    if value is None:
        return False
    if (
        loops
        and isinstance(loops[-1], (ast.ListComp, ast.DictComp))
        and isinstance(node, (ast.Name, ast.Subscript))
    ):
        return False  # one of several lists, each in its own iteration
    thing = value.thing
    if isinstance(thing, Items) and thing.is_whole and len(thing.values) == 1:
        return False
    if isinstance(thing, Object) and thing.kind == "range":
        value = mixed([value, *thing.attrs["bounds"].thing.values])
    whole = mixed([value])
    return whole.spread is Spread.RANK and bool(whole.origin & _WHO)
