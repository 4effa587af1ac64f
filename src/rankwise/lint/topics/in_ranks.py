"""Whether each process of the job makes a call, and with values of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.values import Instance, Items, Object, Value
from rankwise.lint.topics.job_view import is_without_group, spawns

if TYPE_CHECKING:
    from rankwise.lint.model.calls import Call
    from rankwise.lint.script import Entry, Script

#: Where what a rank has is a matter of who it is.
WHO = frozenset({"rank", "local_rank", "node_rank", "group_rank", "share"})
#: What is on the disk is the same for all ranks, or meant to be.
_DISK = frozenset({"files", "unsorted", "exists", "env"})


def differs_deeply(value: Value | None, depth: int = 0) -> bool:
    """Whether anything that went into a value, or into the object that it is, is another one on other ranks."""
    if value is None or depth > 5:
        return False
    if value.origin & WHO or (value.spread and not (value.origin and value.origin <= _DISK)):
        return True
    return any(differs_deeply(part, depth + 1) for part in _parts(value))


def _parts(value: Value) -> list[Value]:
    thing = value.thing
    if isinstance(thing, Items):
        return thing.values[:64]
    if isinstance(thing, (Object, Instance)):
        call = thing.call
        parts = list(thing.attrs.values())
        return parts if call is None else [*parts, *call.args, *call.kwargs.values()]
    return []


def is_in_ranks(script: Script, entry: Entry, call: Call) -> bool:
    """Whether a call is made by each process of the job: not by the one that starts them, nor on a way without a process group."""
    if "spawned" in call.contexts:
        return True
    return not is_without_group(entry, call) and (not entry.is_program or not spawns(script))
