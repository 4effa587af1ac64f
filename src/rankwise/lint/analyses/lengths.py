"""How many samples a data set has, and how many numbers of which type a tensor, where the text tells."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from rankwise.lint.analyses.job_view import text_of
from rankwise.lint.interpreter.values import Items, Library, Object
from rankwise.lint.library.constructor_table import RETURNS_SELF

if TYPE_CHECKING:
    from rankwise.lint.interpreter.values import Call, Value


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
    elif last == "full":
        given = given[:1]
    elif last == "arange":
        bounds = [one.const for one in given]
        return (len(range(*bounds)),) if bounds and all(type(one) is int for one in bounds) else ()
    if len(given) == 1 and isinstance(given[0].thing, Items) and given[0].thing.is_whole:
        given = given[0].thing.values
    return tuple(one.const if type(one.const) is int else None for one in given)


#: Methods whose result has as many elements as their object, of the same type unless they are given another.
_KEEPS_SIZE = RETURNS_SELF | {"clone", "detach", "reshape", "view", "flatten", "squeeze", "unsqueeze", "long", "int"}
_LIKE = frozenset(f"torch.{name}_like" for name in ("zeros", "ones", "empty", "rand", "randn", "full"))
_OF_LISTS = frozenset({"torch.tensor", "torch.as_tensor"})
_FLOATS = frozenset(f"torch.{name}" for name in ("rand", "randn", "zeros", "ones", "empty", "eye"))
#: Names of one type: of the method that converts to it, of the attribute of torch.
_TYPES = {"half": "float16", "float": "float32", "double": "float64", "int": "int32", "long": "int64"}
_NAMED_TYPES = frozenset({*_TYPES.values(), "bfloat16", "bool", "uint8", "int8", "int16"})
#: What torch makes of Python's own types, and methods that take a type without its name.
_PLAIN_TYPES = {"builtins.int": "int64", "builtins.float": "float64"}
_TAKES_TYPE = frozenset({"to", "type", "view", "reshape"})


def num_elements(value: Value | None) -> int | None:
    """How many elements a tensor has."""
    made = value.made if value is not None else None
    if made is None or made.has_star or "out" in made.kwargs or "resize_" in made.module.text:
        return None
    if (pattern := _pattern_of(made)) is not None:
        is_recast = made.name.endswith((".view", ".reshape")) and _given_type(made) is not None
        return None if is_recast else num_elements(pattern)
    if made.name in _OF_LISTS:
        numbers = _numbers(made.arg(0, "data"))
        return len(numbers) if numbers is not None else None
    shape = shape_of(made)
    return prod(one for one in shape if one is not None) if shape and None not in shape else None


def dtype_of(value: Value | None, default: str) -> str:
    """The type of a tensor's elements, ``int64``; empty if it is not known.

    Args:
        value: The tensor.
        default: The type of those that are made of floats without one.
    """
    made = value.made if value is not None else None
    if made is None or made.has_star:
        return ""
    if (given_type := _given_type(made)) is not None:
        return given_type
    word = made.name.rpartition(".")[2]
    kinds: set[type] = {float} if made.name in _FLOATS else set()
    if made.name in _OF_LISTS or made.name == "torch.arange":
        kinds = {type(one) for arg in made.args for one in _numbers(arg) or [None]}
    if kinds and type(None) not in kinds:
        return default if float in kinds else "bool" if kinds == {bool} else "int64"
    return _TYPES.get(word, word if word in _NAMED_TYPES else "") or dtype_of(_pattern_of(made), default)


def _given_type(made: Call) -> str | None:
    """The type that a call is asked for, empty if that is not known; None if it is asked for none."""
    word = made.name.rpartition(".")[2]
    asked = [made.kwargs["dtype"]] if "dtype" in made.kwargs else []
    if word in _TAKES_TYPE:
        given = zip(made.args, getattr(made.node, "args", ()), strict=False)
        asked += [v for v, at in given if isinstance(v.thing, (Library, Object)) or "type" in word + text_of(at)]
    if not asked:
        return None
    name = asked[0].thing.name if isinstance(asked[0].thing, Library) else ""
    word = name.rpartition(".")[2]
    return _PLAIN_TYPES.get(name) or _TYPES.get(word, word if word in _NAMED_TYPES else "")


def _pattern_of(made: Call) -> Value | None:
    """The tensor that another one, which a call makes of it, is as large as."""
    if made.name in _LIKE:
        return made.arg(0, "input")
    return made.receiver if made.name.rpartition(".")[2] in _KEEPS_SIZE else None


def _numbers(value: Value | None) -> list[Any] | None:
    """The numbers of a list of lists; None if not all are known."""
    if value is not None and isinstance(value.thing, Items):
        parts = [_numbers(one) for one in value.thing.values] if value.thing.is_whole else [None]
        return None if None in parts else [one for part in parts for one in part or ()]
    return [value.const] if value is not None and isinstance(value.const, (int, float)) else None
