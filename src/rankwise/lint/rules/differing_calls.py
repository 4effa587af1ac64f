"""Ranks call the same collectives in another order or with other shapes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rankwise.lint.analyses.collective_calls import D, collectives, has_group, in_step, word_of
from rankwise.lint.analyses.job_view import ops, text_of
from rankwise.lint.analyses.lengths import dtype_of, num_elements
from rankwise.lint.finding import Found
from rankwise.lint.interpreter.history import Loop, walk
from rankwise.lint.interpreter.values import Items, Object
from rankwise.lint.library.collective_table import ACTS
from rankwise.lint.library.constructor_table import RETURNS_SELF
from rankwise.lint.rule import rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Entry, Script


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


#: Of functions of which all ranks, or both, pass as much, where they take it.
_GIVEN = {
    name.removeprefix(D): act.takes
    for name, act in ACTS.items()
    if act.takes and not {"scatter_list", "input_split_sizes"} & set(act.signature)
}
_ASK = frozenset({"operator.Compare", "torch.isfinite", "torch.isnan", "torch.where", "torch.nonzero"})


@rule("RW317", "error", "C5", "ranks pass tensors of different sizes or types to one collective")
def shape_differs_between_ranks(script: Script) -> Iterator[Found]:
    texts = [script.unit.code, *(module.text for module in script.project.loaded())]
    default = "" if any("set_default_" in text for text in texts) else "float32"
    for steps in in_step(script, *(D + word for word in _GIVEN if ACTS[D + word].family == "collective")):
        for calls in steps:
            if len({call.name for call in calls}) > 1 or any(map(has_group, calls)):
                break  # from here on, it is not known which calls meet
            if len({call.node for call in calls}) == 1 or not any(call.tests or call.loops for call in calls):
                yield from _unlike(calls, default)
    for entry in script.entries:
        received = _points(entry, "recv", "irecv")
        for (source, target, tag), sent in _points(entry, "send", "isend").items():
            for pair in zip(sent, received.get((target, source, tag), ()), strict=False):
                yield from _unlike(pair, default)
    yield from _selected(script)


def _unlike(calls: Sequence[Call], default: str) -> Iterator[Found]:
    """The first of some calls that meet whose tensor is not like that of the call before all."""
    given = [(call.arg(*at), call.arg_node(*at) or call.node) for call in calls for at in [_GIVEN[word_of(call)]]]
    facts = [(num_elements(value), dtype_of(value, default)) for value, _ in given]
    for call, (_, node), (number, dtype) in zip(calls[1:], given[1:], facts[1:], strict=True):
        is_other_size = None not in {number, facts[0][0]} and number != facts[0][0]
        if is_other_size or ("" not in {dtype, facts[0][1]} and dtype != facts[0][1]):
            sizes = [
                f"{'?' if one is None else one} x {kind or 'some type'}" for one, kind in (facts[0], (number, dtype))
            ]
            yield Found(
                node,
                f"`{text_of(node)}` has size {sizes[1]} on rank {call.rank}, and rank {calls[0].rank} passes {sizes[0]}: {word_of(call)} aborts, hangs or returns garbage",
                "give all the same size and dtype; where the data decides the size, gather the sizes first and then tensors of the largest",
                # Gloo fills the beginning of a tensor that is longer than what comes.
                severity="warning"
                if word_of(call) in {"recv", "irecv"} and (number or 0) > (facts[0][0] or 0)
                else "error",
            )
            return


def _points(entry: Entry, *words: str) -> dict[tuple[int, int, int], list[Call]]:
    """What ranks send or receive, by who does it, with whom and under which tag, in order; nothing if that is not known of one of them."""
    found: defaultdict[tuple[int, int, int], list[Call]] = defaultdict(list)
    for call in (one for history in entry.histories for one in history.calls if one.name.removeprefix(D) in words):
        peer, tag = call.arg(1, "src", "dst"), call.arg(3, "tag")
        number = 0 if tag is None else tag.const
        if peer is None or {type(peer.const), type(number)} != {int} or call.tests or call.loops or has_group(call):
            return {}
        found[call.rank, peer.const, number].append(call)
    return found


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


_FIX = "gather the lengths first, then pad to the longest, gather, and remove the padding"
