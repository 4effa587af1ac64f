"""Whether each process of the job makes a call, and with values of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.analyses.job_view import is_of_one_process, is_without_group, spawns
from rankwise.lint.interpreter.values import AGREED, Instance, Items, Object, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.script import Entry, Script

#: Where what a rank has is a matter of who it is.
WHO = frozenset({"rank", "local_rank", "node_rank", "group_rank", "share"})
#: What is on the disk is the same for all ranks, or meant to be.
_DISK = frozenset({"files", "unsorted", "exists", "loaded", "env"})
#: So many values of an object are looked at.
_MOST = 2000


def inside(value: Value | None, *, computed: bool = False) -> Iterator[Value]:
    """A value and all parts of the list or object that it is; if ``computed``, also what they were computed from, unless ranks have made it equal."""
    waiting, seen = [value] if value is not None else [], set[int]()
    for one in waiting:  # which grows meanwhile
        if computed and one.origin >= AGREED:
            continue
        yield one
        thing, made = one.thing, one.made if computed else None
        calls = [call for call in (getattr(thing, "call", None), made) if call is not None and id(call) not in seen]
        if len(waiting) < _MOST and (calls or id(thing) not in seen):
            seen |= {id(thing), *map(id, calls)}
            waiting += thing.values[:64] if isinstance(thing, Items) else []
            waiting += thing.attrs.values() if isinstance(thing, (Object, Instance)) else []
            waiting += [part for call in calls for part in (call.receiver, *call.args, *call.kwargs.values())]


def differs_deeply(value: Value | None) -> bool:
    """Whether anything that went into a value, or into the object that it is, is another one on other ranks."""
    return any(one.origin & WHO or (one.spread and not (one.origin and one.origin <= _DISK)) for one in inside(value))


def is_in_ranks(script: Script, entry: Entry, call: Call) -> bool:
    """Whether a call is made by each process of the job: not by the one that starts them, nor on a way without a process group."""
    if is_of_one_process(script):
        return False
    if "spawned" in call.contexts:
        return True
    return not is_without_group(entry, call) and (not entry.is_program or not spawns(script))
