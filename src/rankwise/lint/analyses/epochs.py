"""Samplers that shuffle and are used for several epochs, and what tells them which epoch it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.analyses.data_flow import SAMPLER_AT, epoch_loops, is_prepared, passes, sampler_of
from rankwise.lint.analyses.job_view import is_hidden
from rankwise.lint.interpreter.values import Instance, Items, Object, Value, object_of
from rankwise.lint.library.names import SAMPLER

if TYPE_CHECKING:
    import ast

    from rankwise.lint.analyses.data_flow import Pass
    from rankwise.lint.interpreter.values import Call
    from rankwise.lint.script import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffled:
    """A sampler that shuffles, and the training loops that go over its loader, one of each rank.

    Attributes:
        sampler: The sampler, as the first of these ranks made it.
        passes: The loops.
    """

    sampler: Object
    passes: tuple[Pass, ...]


def reshuffled(script: Script) -> list[Shuffled]:
    """Samplers that shuffle, for loops that train in several epochs; each place of the text once."""
    found: dict[tuple[int, int], tuple[Object, list[Pass]]] = {}
    for one in passes(script):
        sampler = sampler_of(one.loader)
        if sampler is None or sampler.call is None or not shuffles(sampler.call) or is_prepared(one.loader):
            continue
        if one.trains and epoch_loops(one, sampler.call):
            found.setdefault((id(sampler.call.node), id(one.loop)), (sampler, []))[1].append(one)
    return [Shuffled(sampler=sampler, passes=tuple(group)) for sampler, group in found.values()]


def shuffles(call: Call) -> bool:
    """Whether a sampler shuffles, as it does if it is not told otherwise."""
    shuffle = call.arg(SAMPLER_AT["shuffle"], "shuffle")
    return not call.has_star and (shuffle is None or shuffle.truth() is True)


def loops_of(one: Pass, shuffled: Shuffled) -> list[ast.AST]:
    """The epoch loops around a pass."""
    return epoch_loops(one, shuffled.sampler.call)


def set_epoch_calls(one: Pass) -> list[Call]:
    """Calls of `set_epoch` on the sampler of this pass that are known to be that."""
    sampler = sampler_of(one.loader)
    return [
        call for call in one.history.calls if call.name == f"{SAMPLER}.set_epoch" and call.receiver.thing is sampler
    ]


def is_reached(one: Pass, shuffled: Shuffled) -> bool:
    """Whether `set_epoch` is called on the sampler, or may be where the text does not tell."""
    sampler = sampler_of(one.loader)
    loops = set(loops_of(one, shuffled))
    for call in one.history.calls:
        if call.name.endswith(".set_epoch") and _may_be(call.receiver, sampler, one.loader):
            return True
        if is_hidden(call) and _takes(call, sampler, one.loader, in_loop=bool(loops & set(call.loops))):
            return True
    return False


def _may_be(receiver: Value, sampler: Object | None, loader: Object) -> bool:
    thing = object_of(receiver)
    if isinstance(thing, Object) and thing.call is not None:
        return thing is sampler or thing is loader
    return not isinstance(thing, Instance)


def _takes(call: Call, sampler: Object | None, loader: Object, *, in_loop: bool) -> bool:
    """Whether a function whose text is not at hand gets the sampler, or in the epoch loop the loader."""
    given = [*call.args, *call.kwargs.values()]
    given += [part for value in given if isinstance(value.thing, (Items,)) for part in value.thing.values]
    return any(
        value.thing is sampler or (in_loop and object_of(value) is loader) for value in given if value.thing is not None
    )
