"""Sends, receives, and collectives that only start."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import (
    FILLED,
    D,
    backends,
    collectives,
    filled_node,
    group_of,
    in_step,
    ranks_in,
    word_of,
)
from rankwise.lint.analyses.in_ranks import WHO
from rankwise.lint.analyses.job_view import function_of, is_distributed, line_of, once, places, statement_of, text_of
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.tensor_text import is_behind, key_of, loads, nodes_in, root_of, targets_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.values import Items, Object, Spread, mixed
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.script import Entry, Script

#: What is known of a tensor before its content is.
_QUIET = frozenset(
    "shape size device dtype numel dim record_stream data_ptr element_size is_cuda nelement".split()  # noqa: SIM905
)


@rule("RW306", "error", "C12", "an asynchronous collective is never waited for")
def handle_never_waited_for(script: Script) -> Iterator[Found]:
    for place in collectives(script, *FILLED, "isend"):
        call, word = place.last, word_of(place.last)
        given = call.kwargs.get("async_op")
        if (
            word not in {"irecv", "isend"} and (given is None or given.const is not True)
        ) or "_coalescing_manager" in call.contexts:
            continue
        later = [
            one
            for history in place.entry.histories
            if history.rank == call.rank
            for one in history.calls
            if one.index > call.index or (call.loops and call.loops[-1] in one.loops)
        ]
        if any(one.name.endswith(("cuda.synchronize", "wait_stream")) for one in later):
            continue
        parent = scopes_of(script.tree).parents.get(call.node)
        holder = key_of(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
        key = key_of(root_of(filled_node(call))) if word in FILLED else ""
        node: ast.AST = call.node
        if isinstance(parent, ast.Expr):
            what = "and its handle is discarded, so nothing can wait for it"
        elif not any(_may_wait(one, call) for one in later) and (
            (place.entry.is_program and not isinstance(parent, ast.Return))
            or (holder.isidentifier() and not _reads(script, call, holder))
        ):
            what = f"and nothing ever waits for `{holder}`" if holder else "and nothing ever waits for it"
        elif (early := _read_early(script, call, holder, key)) is not None:
            node, what = early, f"`{holder}` is waited for only later, and its tensor is read before that"
        else:
            continue
        tensor = f"`{key}`" if key else "its tensor"
        # On one stream of a GPU, nothing is left to wait for after a barrier.
        is_mild = word == "isend" or any(one.name.endswith("barrier") for one in later)
        yield Found(
            node,
            f"{word} only starts here, {what}; {tensor} may hold the old value, the new one or a mixture",
            f"call `{holder}.wait()` before {tensor} is read or changed"
            if holder
            else f"keep the handle and call its `wait()` before {tensor} is read or changed",
            severity="warning" if is_mild else "error",
        )


def _may_wait(one: Call, made: Call) -> bool:
    """Whether a later call waits for the handle that a call has made, or may."""
    values = (one.receiver, *one.args, *one.kwargs.values())
    parts = [
        part
        for value in values
        for part in ([value, *value.thing.values] if isinstance(value.thing, Items) else [value])
    ]
    is_put_by = one.name.rpartition(".")[2] in {"append", "extend", "insert", "clear", "len", "__setattr__"}
    # What a loop has left of an earlier turn is of the same call.
    is_it = any(getattr(getattr(part.thing, "call", None), "node", None) is made.node for part in parts)
    return (is_it and not is_put_by) or one.name in {"?.wait", "?.wait_all", "?.result"}


def _reads(script: Script, call: Call, name: str) -> list[ast.AST]:
    """Where a name is read behind a call, in its function, in the order of the text."""
    found = [one for one in loads(nodes_in(function_of(script.tree, call.node)), name) if is_behind(one, call.node)]
    return sorted(found, key=lambda one: (getattr(one, "lineno", 0), getattr(one, "col_offset", 0)))


def _read_early(script: Script, call: Call, holder: str, key: str) -> ast.AST | None:
    """A read of the tensor between the call and the first use of a handle that is a plain variable, in one block of statements."""
    statement, used = statement_of(script.tree, call.node), _reads(script, call, holder) if holder else []
    above = scopes_of(script.tree).parents.get(statement) if statement is not None else None
    blocks = (getattr(above, name, None) for name in ("body", "orelse", "finalbody"))
    block = next((one for one in blocks if isinstance(one, list) and statement in one), [])
    for one in block[block.index(statement) + 1 :] if used and key and holder.isidentifier() else ():
        if (
            is_behind(one, used[0])
            or used[0] in set(ast.walk(one))
            or any(key_of(target) == key for target in targets_of(one))
        ):
            return None
        for read in loads(list(ast.walk(one)), key):
            around = scopes_of(script.tree).parents.get(read)
            is_next = isinstance(around, ast.Call) and any(word.arg == "async_op" for word in around.keywords)
            if not is_next and not (isinstance(around, ast.Attribute) and around.attr in _QUIET):
                return read
    return None


_POINTS = frozenset(name for name, act in ACTS.items() if act.family == "point")
_Pair = tuple["int | None", "int | None"]
_Queues = dict[int, "list[tuple[str, int | None, Call]]"]
_Waiting = dict[int, "tuple[str, int | None, Call]"]
_HALVES = {"send": "recv", "recv": "send"}
_SENDS, _RECEIVES = frozenset({"send", "send_object_list"}), frozenset({"recv", "recv_object_list"})


@rule("RW313", "error", "C9", "a send and its receive never meet")
def send_never_received(script: Script) -> Iterator[Found]:
    for entry in script.entries:
        waits = list(_waits(script, entry))
        yield from waits
        firsts = _firsts(entry)
        if waits or len(firsts) < 4 or not is_distributed(entry):
            continue
        words = {word_of(one[0]) for one in firsts}
        here = firsts[0][0]
        if here.module is not script.module or any(one[0].tests for one in firsts):
            continue
        later = [{word_of(one) for one in calls[1:]} for calls in firsts]
        if words <= _SENDS and all(_RECEIVES & one for one in later):
            yield _finding(here, "send", "receives")
        elif words <= _RECEIVES and all(_SENDS & one for one in later):
            yield _finding(here, "recv", "sends")


def _waits(script: Script, entry: Entry) -> Iterator[Found]:
    """A send or receive whose other half never comes: on two ranks already, or on those that a larger job has besides."""
    queues = _queues(entry)
    is_known = all(
        type(peer) is int and peer in queues and not (call.tests or call.loops)
        for queue in queues.values()
        for _, peer, call in queue
    )
    two = {rank: queue for rank, queue in queues.items() if rank < 2}
    is_of_two = all(peer in two for queue in two.values() for _, peer, _ in queue)
    stuck = ((_stuck(two) if is_of_two else {}) or _stuck(queues)) if is_known else {}
    stuck = stuck or _alone(queues, has_tags=backends(script) == {"gloo"})
    for rank, (word, peer, call) in stuck.items():
        if call.module is script.module and is_distributed(entry):
            other = stuck.get(peer) if peer is not None else None
            does = (
                f"itself waits for rank {other[1]} (line {line_of(other[2])})"
                if other is not None
                else f"{'receives' if word == 'send' else 'sends'} nothing more for it"
            )
            yield Found(
                call.node,
                f"rank {rank} waits in this {word} for rank {peer}, which {does}",
                f"let each {word} have its other half: `{_HALVES[word]}` on rank {peer}, in the same order",
                severity="error" if is_known and is_of_two and rank < 2 and len(stuck) <= len(two) else "warning",
            )
            return


def _alone(queues: _Queues, *, has_tags: bool) -> _Waiting:
    """Ranks that wait for one that has nothing at all for them, however often it sends; Gloo tells messages apart by their tags."""
    return {
        rank: (word, peer, call)
        for rank, queue in queues.items()
        for word, peer, call in queue
        if word in _HALVES and peer in queues and not call.tests
        and not any(_HALVES[word] in its and whom in {rank, None} and (not has_tags or _may_meet(call, other))
                    for its, whom, other in queues[peer])
    }  # fmt: skip


def _may_meet(one: Call, other: Call) -> bool:
    """Whether two halves have one tag, as far as is known."""
    tags = [0 if (tag := call.arg(3, "tag")) is None else tag.const for call in (one, other)]
    return tags[0] == tags[1] or not all(type(tag) is int for tag in tags)


def _stuck(queues: _Queues) -> _Waiting:
    """Where ranks wait for ever if each send waits for its receive; isend and irecv go on at once."""
    queues = {rank: list(queue) for rank, queue in queues.items()}
    open_sends, open_receives, has_moved = list[_Pair](), list[_Pair](), True
    while has_moved:
        has_moved = False
        for rank, queue in queues.items():
            word, peer, _ = queue[0] if queue else ("", rank, None)
            ahead = queues[peer][0] if peer is not None and queues.get(peer) else None
            if word == "isend":
                open_sends.append((rank, peer))
            elif word == "irecv":
                open_receives.append((peer, rank))
            elif word == "send" and (rank, peer) in open_receives:
                open_receives.remove((rank, peer))
            elif word == "recv" and (peer, rank) in open_sends:
                open_sends.remove((peer, rank))
            elif word == "send" and ahead is not None and ahead[:2] == ("recv", rank):
                queues[int(peer or 0)].pop(0)
            else:
                continue
            queue.pop(0)
            has_moved = True
    return {rank: queue[0] for rank, queue in queues.items() if queue}


def _queues(entry: Entry) -> _Queues:
    """What each of the virtual ranks sends and receives, in order, and with whom; None is a rank that is not known."""
    found: _Queues = {history.rank: [] for history in entry.histories}
    for history in entry.histories:
        for call in (one for one in history.calls if one.name in _POINTS):
            root = ACTS[call.name].root
            given = call.arg(*root) if root is not None else None
            is_plain = given is not None and type(given.const) is int and not call.has_star and group_of(call) is None
            peer = given.const if given is not None and is_plain else None
            found[history.rank].append((word_of(call).removesuffix("_object_list"), peer, call))
    return found


def _firsts(entry: Entry) -> list[list[Call]]:
    found = [[call for call in history.calls if call.name in _POINTS] for history in entry.histories]
    return found if all(found) else []


def _finding(call: Call, word: str, later: str) -> Found:
    return Found(
        call.node,
        f"every rank blocks in this {word} before it {later}, so no rank ever reaches what its peer waits for",
        "use `request = dist.isend(...)`, then `recv`, then `request.wait()`; or let even ranks send first and odd ranks receive first",
    )


@rule("RW314", "error", "C10", "ranks create different groups at the same place, or in another order")
def group_differs_between_ranks(script: Script) -> Iterator[Found]:
    fix = "create all groups on every rank in one loop, and keep the one with this rank in it; or use `dist.new_subgroups_by_enumeration`"
    for place in once(places(script, D + "new_group")):
        node = place.last.arg_node(0, "ranks")
        if _meets_all(place.last) and node is not None and len(place.calls) > 1 and _differs(place):
            yield Found(
                node,
                f"each rank creates another group here, `{text_of(node)}`, but every rank must create all groups, in the same order",
                fix,
            )
    for steps in in_step(script, D + "new_group"):
        for calls in steps:
            lists = {call.node: ranks_in(call.arg(0, "ranks")) for call in calls if _meets_all(call)}
            if len(set(lists.values())) > 1 < len(lists) and None not in lists.values():
                shown = " and ".join(f"`{text_of(node)}`" for node in lists)
                yield Found(calls[0].node, f"ranks create {shown} at once: the two count as one group", fix)
                break


def _meets_all(call: Call) -> bool:
    local = call.kwargs.get("use_local_synchronization")
    return local is None or local.const is False


def _differs(place: Place) -> bool:
    lists = [ranks_in(call.arg(0, "ranks")) for call in place.calls]
    if all(one is not None for one in lists):
        # A group of one needs no other rank.
        return len(set(lists)) > 1 and any(len(one or ()) > 1 for one in lists)
    value = place.last.arg(0, "ranks")
    loops, node = place.last.loops, place.last.arg_node(0, "ranks")
    if value is None:
        return False
    if loops and isinstance(loops[-1], (ast.ListComp, ast.DictComp)) and isinstance(node, (ast.Name, ast.Subscript)):
        return False  # one of several lists, each in its own iteration
    thing = value.thing
    if isinstance(thing, Items) and thing.is_whole and len(thing.values) == 1:
        return False
    if isinstance(thing, Object) and thing.kind == "range":
        value = mixed([value, *thing.attrs["bounds"].thing.values])
    whole = mixed([value])
    return whole.spread is Spread.RANK and bool(whole.origin & WHO)
