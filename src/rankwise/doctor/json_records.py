"""Frozen dataclasses as plain JSON, by the names of their fields, and back; a class may say itself how, as `Reading` does."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rankwise.doctor.probe import Fact, Facts

Reader: TypeAlias = Callable[[Fact], object]

Record = TypeVar("Record")
Value = TypeVar("Value")
_LARGEST = 1 << 53


def to_json(value: object) -> Fact:
    """Return a value as plain JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple):
        return [to_json(one) for one in value]
    if hasattr(value, "to_json"):
        return cast("Fact", value.to_json())
    kind: type = type(value)
    return {name: to_json(getattr(value, name)) for name in _read_hints(kind)}


def from_json(kind: type[Record], info: Fact) -> Record:
    """Read a record again; what is missing has its usual value.

    ValueError: something is of another type, or no such record.
    """
    if not isinstance(info, dict):
        raise ValueError(f"{info!r:.60} is no {kind.__name__}")  # noqa: TRY004 - of a message, not of a call
    hints = _read_hints(cast("type", kind))
    known = {name: _make_reader(hint)(info[name]) for name, hint in hints.items() if info.get(name) is not None}
    try:
        return kind(**known)
    except TypeError as error:  # what has no usual value is missing
        raise ValueError(f"{info!r:.60} is no {kind.__name__}: {error}") from error


def read_int(value: Fact) -> int | None:
    """Return a whole number, or None."""
    return value if type(value) is int and abs(value) <= _LARGEST else None


def read_float(value: Fact) -> float:
    """Return a number; 0 if it is none, or none that can be reckoned with."""
    if isinstance(value, int):
        return float(max(-_LARGEST, min(value, _LARGEST)))
    return value if isinstance(value, float) and math.isfinite(value) else 0.0


@cache
def _read_hints(kind: type) -> dict[str, object]:
    return dict(get_type_hints(kind, include_extras=True))


@cache
def _make_reader(hint: object) -> Reader:
    """Return what reads a value of a type, and raises ValueError for what is none."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return _make_reader(kinds[0])
    if origin is Annotated:
        read = _make_reader(kinds[0])
        return lambda value: _check(read(value), kinds[1])
    if origin is tuple:
        return _make_tuple_reader(kinds)
    if isinstance(hint, type) and is_dataclass(hint):
        record: type = hint
        own = cast("Callable[[Facts], object] | None", getattr(hint, "from_json", None))
        return lambda value: own(value if isinstance(value, dict) else {}) if own else from_json(record, value)
    fits: dict[object, Callable[[object], bool]] = {
        float: lambda one: type(one) in {int, float}, int: lambda one: type(one) is int and abs(one) <= _LARGEST,
        bool: lambda one: type(one) is bool, str: lambda one: type(one) is str,
    }  # fmt: skip
    choice = kinds.__contains__ if origin is Literal else fits[hint]
    return lambda value: read_float(_check(value, choice)) if hint is float else _check(value, choice)


def _make_tuple_reader(kinds: tuple[object, ...]) -> Reader:
    readers = [_make_reader(kind) for kind in kinds if kind is not Ellipsis]

    def read(value: Fact) -> object:
        values = value if isinstance(value, list) else []
        own = readers * len(values) if kinds[-1] is Ellipsis else readers
        if not isinstance(value, list) or len(own) != len(values):
            raise ValueError(f"{value!r:.60} is no such list")
        return tuple(reader(one) for reader, one in zip(own, values, strict=True))

    return read


def _check(value: Value, fits: Callable[[Value], bool]) -> Value:
    if not fits(value):
        raise ValueError(f"{value!r:.60} can't be that")
    return value
