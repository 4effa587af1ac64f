"""Which rank a device index was made of: the global one, or the global one folded onto a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rankwise.lint.analyses.job_view import INIT
from rankwise.lint.analyses.tensors import sources_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.analyses.job_view import Place
    from rankwise.lint.interpreter.values import Call, Value

Fault = Literal["bare", "folded"]
_LOCAL = frozenset({"local_rank", "spawned", "node_rank", "host", "env", "local_world_size"})
_OWN = frozenset({"rank", "local_rank", "spawned"})


def fault_of(place: Place, value: Value | None) -> Fault | None:
    """What is wrong with a device that is chosen by the rank; None if nothing is, or it is not certain."""
    rank = place.last.rank
    if value is None or not (_is_global(value) or _counts_nodes(value)) or rank < 2 or value.const is None:
        return None
    if not place.entry.is_program and not _is_given_global(place.entry.histories[-1].calls, value):
        return None  # a parameter of that name may be anything, as what mp.spawn gives in another file
    if any(map(_folds, sources_of(value, cuts=False))):
        return "folded"
    if value.const in (rank, f"cuda:{rank}", f"xpu:{rank}", f"npu:{rank}") or "node_rank" in value.origin:
        return "bare"
    return "folded" if value.is_known else None


def _counts_nodes(value: Value) -> bool:
    """Whether it is, or was written with, ``node * gpus + gpu``, and the group is made with that as the rank."""
    made = value.made
    parts = made.args if made is not None and made.name in {"operator.JoinedStr", "torch.device"} else (value,)
    sums = [one for one in parts if one.origin & _OWN and one.made and one.made.name == "operator.Add"]
    return any(
        side.made
        and side.made.name == "operator.Mult"
        and not side.origin & _OWN
        and ("rank" in one.origin or "node_rank" in side.origin)
        for one in sums
        for side in (one.made.args if one.made else ())
    )


def _folds(value: Value) -> bool:
    """Whether it is ``rank % n``, not ``"cuda:%d" % rank``."""
    made = value.made
    return made is not None and made.name == "operator.Mod" and not isinstance(made.args[0].const, str)


def _is_given_global(calls: Sequence[Call], value: Value) -> bool:
    """Whether a call gave the global rank that a value is of, or the group is made with it where the local one is another value."""
    starts = (call.arg(4, "rank") for call in calls if call.name == INIT)
    is_start = any(rank is not None and rank.origin == {"rank"} for rank in starts)
    has_both = is_start and any(value.origin == {"local_rank"} for call in calls for value in call.args)
    given = {id(call.result.thing) for call in calls if _is_global(call.result) and not _is_global(call.given)}
    return has_both or any(one.thing is not None and id(one.thing) in given for one in sources_of(value, cuts=False))


def _is_global(value: Value) -> bool:
    """Whether it was computed from the global rank, and nothing of this node's."""
    return bool(value.spread) and "rank" in value.origin and not value.origin & _LOCAL
