"""How many samples a data set has, where its text tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.values import Items, Object

if TYPE_CHECKING:
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value


def length_of(value: Value | None, depth: int = 0) -> int | None:
    """How many samples a data set has, where its text tells."""
    if value is None or depth > 4:
        return None
    thing = value.thing
    if isinstance(thing, Items):
        return len(thing.values) if thing.is_whole else None
    if isinstance(value.const, (list, tuple, str, range)):
        return len(value.const)
    return _length_of_object(thing, depth) if isinstance(thing, Object) and thing.call is not None else None


def _length_of_object(thing: Object, depth: int) -> int | None:
    call = thing.call
    if call is None or thing.kind == "range":
        length = thing.attrs["length"].const if call is not None and thing.attrs["length"].is_known else None
        return length if isinstance(length, int) else None
    if thing.kind == "torch.utils.data.TensorDataset":
        return length_of(call.args[0], depth + 1) if call.args else None
    if thing.kind == "torch.utils.data.Subset":
        return length_of(call.arg(1, "indices"), depth + 1)
    return _rows(call)


def _rows(call: Call) -> int | None:
    """The first size of a tensor that was made with its sizes as numbers."""
    last = call.name.rpartition(".")[2]
    if not call.name.startswith("torch.") or last not in {
        "rand",
        "randn",
        "zeros",
        "ones",
        "empty",
        "arange",
        "randint",
        "randperm",
    }:
        return None
    if last == "randint":
        sizes = [one for one in call.args if isinstance(one.thing, Items)]
        first = sizes[0].thing.values[0] if sizes and sizes[0].thing.values else None
    else:
        first = call.args[0] if call.args else None
        if first is not None and isinstance(first.thing, Items):
            first = first.thing.values[0] if first.thing.values else None
        if last == "arange" and len(call.args) > 1:
            return None
    number = first.const if first is not None and first.is_known else None
    return int(number) if isinstance(number, (int, float)) and not isinstance(number, bool) else None
