"""Collectives of torch.distributed in a script: what they write to, who is their source, who makes them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import INIT, Place, backend_of, once, places
from rankwise.lint.analyses.scopes import scopes_of
from rankwise.lint.interpreter.values import Items, Object, Value
from rankwise.lint.library.collective_table import ACTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.script import Script

D = "torch.distributed."
#: By the function's last word, position and name of what it writes to, and of the rank that gives or takes.
FILLED = {
    name.removeprefix(D): act.fills[:2]
    for name, act in ACTS.items()
    if act.signature and act.fills and act.family != "barrier"
}
ROOTED = {name.removeprefix(D): act.root for name, act in ACTS.items() if act.root and act.family == "collective"}
OBJECTS = frozenset({"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"})


def collectives(script: Script, *words: str) -> Iterator[Place]:
    """Places of these collectives in this text, each once; of all that fill something if none is named."""
    return once(places(script, *(D + word for word in words or FILLED)))


def in_step(script: Script, *names: str) -> Iterator[list[tuple[Call, ...]]]:
    """By entry, what each rank calls of these functions as its first, its second, ...; where all ranks make equally many calls."""
    for entry in script.entries:
        made = [
            [call for call in history.calls if call.name in names and call.module is script.module]
            for history in entry.histories
        ]
        if len(set(map(len, made))) == 1 and made[0]:
            yield list(zip(*made, strict=True))


def word_of(call: Call) -> str:
    """``all_reduce``."""
    return call.name.rpartition(".")[2]


def group_of(call: Call) -> Value | None:
    """The group that was given, if it may be another than that of all ranks."""
    act = ACTS.get(call.name)
    group = call.arg(act.group if act is not None else None, "group")
    if group is None or (group.is_known and group.const is None):
        return None
    if isinstance(group.thing, Object) and group.thing.kind == "world":
        return None
    if getattr(group.thing, "name", "").lower().endswith(".world"):
        return None
    return group


def has_group(call: Call) -> bool:
    """Whether it may be for a part of the ranks."""
    return group_of(call) is not None or call.has_star


def filled_node(call: Call) -> ast.AST | None:
    """The text of what it writes its result to."""
    position, name = FILLED[word_of(call)]
    return call.arg_node(position, name)


#: Methods that give several parts of a tensor.
_PARTS = frozenset({"chunk", "split", "tensor_split", "unbind"})


def list_text(script: Script, node: ast.AST | None) -> ast.expr | None:
    """The text of a list that an argument is in any case: its own, or what the one line that binds its name gives it."""
    if isinstance(node, ast.Name):
        scopes = scopes_of(script.tree)
        only = scopes.only(node.id, scopes.scope(node))
        parent = scopes.parents.get(only) if only is not None else None
        node = parent.value if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "list" and node.args:
        node = node.args[0]
    if isinstance(node, ast.BinOp):
        return node if isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List) else None
    is_parts = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _PARTS
    return node if isinstance(node, (ast.List, ast.ListComp)) or is_parts else None  # type: ignore[return-value]


def root_value(call: Call) -> Value | None:
    """``src`` or ``dst``, if given."""
    position, name = ROOTED[word_of(call)]
    return call.arg(position, name)


def root_rank(call: Call) -> int | None:
    """The number of the source or destination; 0 where it was left out; None if not known."""
    value = root_value(call)
    if value is None:
        return None if "group_src" in call.kwargs or "group_dst" in call.kwargs else 0
    if value.is_known and value.const is None:
        return None
    return value.const if isinstance(value.const, int) else None


def backends(script: Script) -> set[str | None]:
    """The backends of all calls that make the process group; None for one that is not known."""
    return {backend_of(call) for call in script.all_calls if call.name == INIT}


def ranks_in(value: Value | None) -> tuple[int, ...] | None:
    """A list of ranks whose numbers are all known."""
    if value is None:
        return None
    thing = value.thing
    if isinstance(thing, Items) and thing.is_whole and thing.keys is None:
        numbers = [one.const for one in thing.values]
        return tuple(numbers) if all(isinstance(one, int) for one in numbers) else None
    if isinstance(thing, Object) and thing.kind == "range":
        bounds = [one.const for one in thing.attrs["bounds"].thing.values]
        if bounds and all(isinstance(one, int) for one in bounds):
            return tuple(range(*bounds))[:64]
    return None


def members_of(group: Value | None) -> tuple[int, ...] | None:
    """The ranks of a group that `new_group` has made of a known list."""
    call = group.thing.call if group is not None and isinstance(group.thing, Object) else None
    if call is None or call.name != D + "new_group":
        return None
    return ranks_in(call.arg(0, "ranks"))
