"""Ranks call the same collectives in another order or with other shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import D, collectives, has_group, word_of
from rankwise.lint.analyses.job_view import ops, text_of
from rankwise.lint.analyses.lengths import shape_of
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.history import Loop, walk
from rankwise.lint.interpreter.values import Items, Object
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.constructor_table import RETURNS_SELF
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.interpreter.values import Value
    from rankwise.lint.script import Script


@rule("RW315", "error", "C4", "collectives run in the order of a set or of a directory listing")
def order_differs_between_ranks(script: Script) -> Iterator[Found]:
    items = (item for entry in script.entries for history in entry.histories for item in walk(history.items))
    for loop in (item for item in items if isinstance(item, Loop)):
        order = _order(loop.value)
        # Any two barriers can be paired.
        op = next((op for op in ops(loop.items) if op.family != "barrier"), None)
        head = getattr(loop.node, "generators", [loop.node])[0]
        node = getattr(head, "iter", None)
        if order and op is not None and node is not None and loop.module is script.module:
            yield Found(
                node,
                f"{order} has a different order in each process, so ranks call `{op.name}` for different items of `{text_of(node)}`",
                f"loop over `sorted({text_of(node)})`",
                # A listing of a folder that ranks share does not have to differ.
                severity="error" if order == "a set" else "warning",
            )


def _order(value: Value) -> str:
    """What makes the order differ; empty if nothing known does."""
    thing = value.thing
    if isinstance(thing, Items):
        is_numbers = bool(thing.values) and all(isinstance(one.const, (int, float)) for one in thing.values)
        return "a set" if thing.kind == "set" and not is_numbers else ""
    if isinstance(thing, Object) and "of" in thing.attrs:  # enumerate, zip
        inner = thing.attrs["of"]
        return next(
            (
                order
                for one in ([inner, *inner.thing.values] if thing.kind == "zip" else [inner])
                if (order := _order(one))
            ),
            "",
        )
    return "a directory listing" if thing is None and "unsorted" in value.origin else ""


_GIVEN = {
    word: takes
    for word in (
        "all_reduce",
        "all_gather",
        "broadcast",
        "reduce",
        "gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    )
    if (takes := ACTS[D + word].takes)
}
_ASK = frozenset({"operator.Compare", "torch.isfinite", "torch.isnan", "torch.where", "torch.nonzero"})


@rule("RW317", "error", "C5", "ranks pass tensors of different shapes to one collective")
def shape_differs_between_ranks(script: Script) -> Iterator[Found]:
    for place in collectives(script, *_GIVEN):
        if has_group(place.last) or len(place.calls) < 2:
            continue
        position, name = _GIVEN[word_of(place.last)]
        shapes = {call.rank: _shape(call.arg(position, name)) for call in place.calls}
        if None in shapes.values() or len(set(shapes.values())) < 2:
            continue
        node = place.last.arg_node(position, name) or place.last.node
        first, last = min(shapes), next(rank for rank in shapes if shapes[rank] != shapes[min(shapes)])
        yield Found(
            node,
            f"`{text_of(node)}` has size {_shown(shapes[first])} on rank {first} and {_shown(shapes[last])} on rank {last}: {word_of(place.last)} aborts, hangs or returns garbage",
            "pad to one size, or gather the sizes first and then tensors of the largest",
        )
    yield from _selected(script)


def _selected(script: Script) -> Iterator[Found]:
    """``x[x > 0.5]`` of each rank's own data, gathered as if all ranks had selected equally many."""
    for place in collectives(script, "all_gather", "all_gather_into_tensor"):
        call = place.last
        value, node = call.arg(1, "tensor", "input_tensor"), call.arg_node(1, "tensor", "input_tensor")
        if value is None or node is None or not value.spread or has_group(call):
            continue
        if "share" in value.origin and not {"item", "mean"} & value.origin:  # a number has no length
            message = f"`{text_of(node)}` is every rank's share of something: the shares differ in length if it can't be divided evenly, and {word_of(call)} aborts, hangs or returns garbage"
            yield Found(node, message, _FIX, severity="warning")
            continue
        picked = _picked(value)
        if picked is not None:
            yield Found(
                node,
                f"`{text_of(picked.node)}` selects from each rank's own data, so `{text_of(node)}` has a different length on each rank: {word_of(call)} aborts, hangs or returns garbage",
                _FIX,
            )


def _picked(value: Value) -> Call | None:
    """The call or index whose result is as long as the values decide, if the value is that."""
    made = value.made
    while made is not None and made.name.rpartition(".")[2] in RETURNS_SELF | {"detach", "clone"}:
        made = made.receiver.made
    if made is None or made.name.rpartition(".")[2] in {"nonzero", "masked_select", "unique", "argwhere"}:
        return made
    index = made.args[1].made if made.name == "operator.Subscript" else None
    return made if index is not None and index.name in _ASK else None


def _shape(value: Value | None) -> tuple[int | None, ...] | None:
    call = value.thing.call if value is not None and isinstance(value.thing, Object) else None
    shape = shape_of(call) if call is not None else ()
    return shape if shape and None not in shape else None


def _shown(shape: tuple[int | None, ...] | None) -> str:
    return "x".join(str(one) for one in shape or ())


_FIX = "gather the lengths first, then pad to the longest, gather, and remove the padding"
