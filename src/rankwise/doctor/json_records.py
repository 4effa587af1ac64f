"""Frozen dataclasses as plain JSON, by the names of their fields, and back; a class may say itself how, as `Reading` does."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from typing import TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rankwise.doctor.probe import Fact, Facts

Reader: TypeAlias = Callable[[Fact], object]

Record = TypeVar("Record")
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


def from_json(kind: type[Record], info: Facts) -> Record | None:
    """Read a record again; what is missing, or of another type, has its usual value.

    None: what has no usual value is missing.
    """
    hint: type = kind
    return cast("Record | None", _make_reader(hint)(dict(info)))


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
    return dict(get_type_hints(kind))


@cache
def _make_reader(hint: object) -> Reader:
    """Return what reads a value of a type, and returns None for what is none."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return _make_reader(kinds[0])
    if origin is tuple:
        return _make_tuple_reader(kinds)
    if isinstance(hint, type) and hasattr(hint, "from_json"):
        read_own = cast("Reader", hint.from_json)
        return lambda value: read_own(value) if isinstance(value, dict) else None
    if isinstance(hint, type) and is_dataclass(hint):
        return _make_record_reader(hint)
    scalars: dict[object, Reader] = {
        bool: lambda value: value if isinstance(value, bool) else None,
        int: read_int,
        float: lambda value: read_float(value) if type(value) in {int, float} else None,
    }
    return scalars.get(hint, lambda value: value if isinstance(value, str) else None)


def _make_tuple_reader(kinds: tuple[object, ...]) -> Reader:
    readers = [_make_reader(kind) for kind in kinds if kind is not Ellipsis]

    def read(value: Fact) -> object:
        if not isinstance(value, list):
            return None
        if kinds[-1] is Ellipsis:
            return tuple(one for one in map(readers[0], value) if one is not None)
        found = tuple(reader(one) for reader, one in zip(readers, value, strict=False))
        return found if len(value) == len(readers) and None not in found else None

    return read


def _make_record_reader(kind: type) -> Reader:
    readers = {name: _make_reader(hint) for name, hint in _read_hints(kind).items()}
    blank = {name: hint() for name, hint in _read_hints(kind).items() if hint in (str, int, float)}

    def read(value: Fact) -> object:
        if not isinstance(value, dict):
            return None
        known = ((name, reader(value[name])) for name, reader in readers.items() if name in value)
        try:
            return kind(**blank | {name: one for name, one in known if one is not None})
        except TypeError:  # what has no usual value is missing
            return None

    return read
