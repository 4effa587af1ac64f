"""The rank that gives or takes, and what the others pass."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import (
    FILLED,
    ROOTED,
    D,
    collectives,
    filled_node,
    group_of,
    has_group,
    list_text,
    members_of,
    root_rank,
    root_value,
    word_of,
)
from rankwise.lint.analyses.job_view import is_distributed, is_parameter, places_of, text_of
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.analyses.turns import is_made_anyway
from rankwise.lint.finding import Found, span_of
from rankwise.lint.interpreter.notes import LEFT
from rankwise.lint.interpreter.values import Items, Object
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script

#: Methods that put a value by, for whoever asks for it.
_KEEPS = frozenset({"append", "extend", "clear", "setdefault", "__setitem__", "__setattr__"})


@rule("RW302", "error", "C16", "the result of reduce or gather is used on ranks that do not have it")
def result_of_one_rank(script: Script) -> Iterator[Found]:
    reported: set[ast.AST] = set()
    for entry in script.entries:
        history = entry.histories[-1]
        if not is_distributed(entry):
            continue
        makers = {f"{LEFT}{id(call.node)}": call for call in history.calls if word_of(call) in ROOTED}
        for place in places_of(entry, module=script.module):
            call = place.last
            is_here = place.is_made_by_all and not call.guards and call.rank == history.rank
            for node, value in _used(script, call) if is_here else ():
                for origin in value.origin:
                    made = makers.get(origin)
                    if made is not None and made.node not in reported and made.module is script.module:
                        reported.add(made.node)
                        yield _tell(script, made, node)


def _used(script: Script, call: Call) -> Iterator[tuple[ast.AST, Value]]:
    """What a call that is made for its effect works with, and what the tests around any call ask for."""
    yield from ((test, value) for test, value, _ in call.tests)
    word = call.name.rpartition(".")[2]
    is_statement = isinstance(scopes_of(script.tree).parents.get(call.node), ast.Expr)
    if is_statement and call.name not in ACTS and word not in _KEEPS and not word.endswith("_"):
        yield from ((call.node, value) for value in (call.receiver, *call.args, *call.kwargs.values()))


def _tell(script: Script, made: Call, used: ast.AST) -> Found:
    word, key, root = word_of(made), text_of(filled_node(made)), root_rank(made) or 0
    # Shown beside the rank it may be meant; what was made of it is not.
    is_shown = isinstance(used, ast.Call) and text_of(used.func) == "print" and key in ast.unparse(used)
    return Found(
        used,
        f"every rank uses `{key}` here, but `{word}` gives the result to rank {root} only; the others hold something else",
        f"use `all_{word}`, broadcast `{key}` afterwards, or use it under `if dist.get_rank() == {root}`",
        severity="warning" if is_shown else "error",
        also=[(f"{word} to rank {root}", script.unit.path, span_of(made.node, script.unit.lines))],
    )


#: Position and name of the list that only one rank may give.
_LISTS = {word: (1, ACTS[D + word].signature[1]) for word in ("gather", "gather_object", "scatter")}


@rule("RW309", "error", "C19", "gather_list or scatter_list is passed on every rank")
def list_on_other_ranks(script: Script) -> Iterator[Found]:
    for place in collectives(script, *_LISTS):
        call, root, (at, name) = place.last, root_rank(place.last), _LISTS[word_of(place.last)]
        node = call.arg_node(at, name)
        is_open = root is None or has_group(call) or bool(call.tests) or not place.is_made_by_all
        if is_open or node is None or not is_made_anyway(call) or not _is_filled(script, node, call.arg(at, name)):
            continue
        yield Found(
            node,
            f"every rank passes `{text_of(node)}` to {word_of(call)}, which only rank {root} may do: the others fail with a ValueError, and rank {root} with a lost connection",
            f"pass `{text_of(node)} if dist.get_rank() == {root} else None`",
        )


def _is_filled(script: Script, node: ast.AST, value: Value | None) -> bool:
    """Whether a list has something in it on each rank: one for each rank, or what stands in the text."""
    text, made = list_text(script, node), value.made if value is not None else None
    if isinstance(text, ast.ListComp):
        (first, *_), parts = text.generators, [*ast.walk(text.generators[0])]
        is_range = isinstance(first.iter, ast.Call) and getattr(first.iter.func, "id", "") == "range"
        return is_range and not any(isinstance(one, (ast.IfExp, ast.BoolOp, ast.Compare)) for one in parts)
    if isinstance(text, ast.BinOp):
        return made is not None and any("world_size" in one.origin and one.is_known for one in made.args)
    return isinstance(text, ast.Call) or any(not isinstance(one, ast.Starred) for one in getattr(text, "elts", ()))


@rule("RW310", "error", "C20", "ranks call broadcast_object_list with lists of different lengths")
def object_lists_differ_in_length(script: Script) -> Iterator[Found]:
    for place in collectives(script, "broadcast_object_list"):
        node = place.last.arg_node(0, "object_list")
        lengths = {call.rank: _length(call.arg(0, "object_list")) for call in place.calls}
        known = {rank: one for rank, one in lengths.items() if one}
        if len(known) < 2 or len(set(known.values())) < 2 or len(known) != len(lengths):
            continue
        first, last = min(known), max(known)
        yield Found(
            place.last.node,
            f"`{text_of(node)}` holds {known[first]} on rank {first} and {known[last]} on rank {last}, so receivers abort or wait forever",
            "make the receivers' list as long as the source's, or send everything as one object: `[everything]` and `[None]`",
        )


def _length(value: Value | None) -> str:
    thing = value.thing if value is not None else None
    if isinstance(thing, Items):
        return f"{len(thing.values)} objects" if thing.keys is None and thing.is_whole else ""
    return "one object for each file" if value is not None and thing is None and "files" in value.origin else ""


@rule("RW311", "error", "C8 C16", "src or dst differs between ranks")
def source_depends_on_rank(script: Script) -> Iterator[Found]:
    for place in collectives(script, *ROOTED):
        if has_group(place.last) or len(place.calls) < 2:
            continue
        if any(test.spread for call in place.calls for _, test, _ in call.tests):
            # `if owner == rank:` in a loop over owners.
            continue
        roots = {call.rank: value for call in place.calls if (value := root_value(call)) is not None}
        numbers = {value.const for value in roots.values() if value.is_known and isinstance(value.const, int)}
        if len(numbers) < 2 or not any(value.spread for value in roots.values()):
            continue
        position, name = ROOTED[word_of(place.last)]
        node = place.last.arg_node(position, name)
        if isinstance(node, ast.Name) and not place.entry.is_program and is_parameter(place.last, node.id):
            continue  # `def send(tensor, rank)`: the caller may mean another rank than its own
        yield Found(
            node or place.last.node,
            f"{name}={text_of(node)} is {_shown(numbers)} on different ranks, but all must name the same rank in {word_of(place.last)}",
            f"name one rank for all, `{name}=0`",
        )


def _shown(numbers: set[int]) -> str:
    *most, last = sorted(numbers)
    return f"{', '.join(str(one) for one in most)} and {last}"


@rule("RW312", "error", "C11", "a rank that uses a group, or its src or dst, is not a member of it")
def source_outside_of_group(script: Script) -> Iterator[Found]:
    for place in collectives(script, *FILLED, "barrier"):
        members = members_of(group_of(place.last))
        if members and place.last.guards and not {call.rank for call in place.calls} & set(members):
            what = f"none of the ranks that come here is in the group of ranks {', '.join(map(str, members[:8]))}"
            yield Found(place.last.node, f"{what}: {word_of(place.last)} does nothing", "call it on the members")
    for place in collectives(script, *ROOTED):
        call = place.last
        group = group_of(call)
        value = root_value(call)
        if group is None or value is None or not isinstance(group.thing, Object) or group.thing.call is None:
            continue
        position, name = ROOTED[word_of(call)]
        node = call.arg_node(position, name) or call.node
        members = members_of(group)
        shown = text_of(node)
        if members and isinstance(value.const, int) and value.const not in members and not value.spread:
            fix = f"use `{name}={members[0]}`, or `group_{name}=0`"
            what = f"its members are {', '.join(str(one) for one in members[:8])}"
        elif _is_group_rank(value) and not (members and members[0] == 0):
            fix, what = (
                f"use `group_{name}={shown}`, or `dist.get_global_rank(group, {shown})`",
                "it is a rank within the group",
            )
        else:
            continue
        yield Found(node, f"{name} must be a global rank that belongs to the group, and `{shown}` is not: {what}", fix)


def _is_group_rank(value: Value) -> bool:
    """Whether it is `get_rank(group)`, or runs over `range(get_world_size(group))`."""
    made = value.made
    size = made.args[0].made if made is not None and made.name == "builtins.range" and len(made.args) == 1 else None
    is_of_group = size is not None and size.name == D + "get_world_size" and "world_size" not in size.result.origin
    return "group_rank" in value.origin or is_of_group
