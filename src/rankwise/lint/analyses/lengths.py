"""How many samples a data set has, where its text tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.interpreter.values import Items, Object

if TYPE_CHECKING:
    from rankwise.lint.interpreter.calls import Call
    from rankwise.lint.interpreter.values import Value


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
    return next(iter(shape_of(call)), None)


_SIZED = frozenset(
    f"torch.{name}" for name in ("rand", "randn", "zeros", "ones", "empty", "full", "arange", "randint", "randperm")
)


def shape_of(call: Call) -> tuple[int | None, ...]:
    """The shape of a tensor that a call makes, with None for sizes that are not known; empty if nothing is."""
    if call.name not in _SIZED or call.has_star or "out" in call.kwargs:
        return ()
    given, last = list(call.args), call.name.rpartition(".")[2]
    if last == "randint":
        given = [one for one in given if isinstance(one.thing, Items)]
    elif last in {"full", "arange"}:
        given = given[:1] if last == "full" or len(given) == 1 else []
    if len(given) == 1 and isinstance(given[0].thing, Items) and given[0].thing.is_whole:
        given = given[0].thing.values
    return tuple(one.const if type(one.const) is int else None for one in given)
