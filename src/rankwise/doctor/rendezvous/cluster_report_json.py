"""What several hosts have found of each other, as JSON and back: the names are those of the dataclasses, but for a reading's class."""

from __future__ import annotations

import types
from dataclasses import is_dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias, Union, get_args, get_origin, get_type_hints

from rankwise.doctor.reading import Reading
from rankwise.doctor.rendezvous import cluster_report
from rankwise.doctor.rendezvous.cluster_report import ClusterReport
from rankwise.doctor.rendezvous.sanitize import clean_all
from rankwise.doctor.rendezvous.wire import number, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.doctor.reading import Fact, Facts

    Reader: TypeAlias = Callable[[Fact], object]


def to_json(found: ClusterReport) -> dict[str, Fact]:
    """Return it as plain JSON."""
    return {name: _to_plain(getattr(found, name)) for name in _list_fields(ClusterReport)}


def from_json(message: Facts) -> ClusterReport:
    """Read it again; what is missing, or of another type, has its usual value.

    Raises:
        ValueError: It is something else.
    """
    message = clean_all(message)
    if not isinstance(message.get("hosts"), list):
        raise ValueError(  # noqa: TRY004 - a text from elsewhere, not an argument of the wrong type
            f"no list of hosts in {message!r:.200}"
        )
    found = _make_reader(ClusterReport)(message)
    if not isinstance(found, ClusterReport):
        raise ValueError(f"no report of hosts: {message!r:.200}")  # noqa: TRY004 - as above
    return found


def _to_plain(value: object) -> Fact:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple):
        return [_to_plain(one) for one in value]
    if isinstance(value, Reading):
        return value.to_json()
    kind: type = type(value)
    return {name: _to_plain(getattr(value, name)) for name in _list_fields(kind)}


@cache
def _list_fields(kind: type) -> tuple[str, ...]:
    return tuple(get_type_hints(kind, {**vars(cluster_report), "Reading": Reading}))


@cache
def _make_reader(hint: object) -> Reader:
    """Return what reads a value of a type, and returns None for what is none; text is cleaned already."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        read = _make_reader(kinds[0])
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _make_tuple_reader(kinds)
    if is_dataclass(hint) and isinstance(hint, type) and hint is not Reading:
        return _make_dataclass_reader(hint)
    scalars: dict[object, Reader] = {
        bool: lambda value: value if isinstance(value, bool) else None,
        int: lambda value: None if isinstance(value, bool) else whole({"": value}, ""),
        float: lambda value: (
            number({"": value}, "")
            if isinstance(value, int | float) and not isinstance(value, bool)
            else None
        ),
        Reading: lambda value: Reading.from_json(value) if isinstance(value, dict) else None,
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


def _make_dataclass_reader(kind: type) -> Reader:
    hints = get_type_hints(kind, {**vars(cluster_report), "Reading": Reading})
    readers = {name: _make_reader(hint) for name, hint in hints.items()}
    blank = {name: hint() for name, hint in hints.items() if hint in (str, int, float)}

    def read(value: Fact) -> object:
        if not isinstance(value, dict):
            return None
        known = ((name, reader(value[name])) for name, reader in readers.items() if name in value)
        try:
            return kind(**blank | {name: one for name, one in known if one is not None})
        except TypeError:  # what has no usual value is missing
            return None

    return read
