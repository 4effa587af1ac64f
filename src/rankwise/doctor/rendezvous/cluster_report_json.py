"""What several hosts have found of each other, as JSON and back: the names are those of the dataclasses, but for a reading's class."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, Union, cast, get_args, get_origin, get_type_hints

from rankwise.doctor.reading import Reading
from rankwise.doctor.rendezvous import cluster_report
from rankwise.doctor.rendezvous.cluster_report import ClusterReport
from rankwise.doctor.rendezvous.sanitize import clean_all
from rankwise.doctor.rendezvous.wire import number, text, whole

if TYPE_CHECKING:
    from rankwise.doctor.reading import Fact, Facts


def to_json(found: ClusterReport) -> dict[str, Fact]:
    """Return it as plain JSON."""
    return {one.name: _to_plain(getattr(found, one.name)) for one in fields(found)}


def from_json(message: Facts) -> ClusterReport:
    """Read it again; what is missing, or of another type, has its usual value.

    Raises:
        ValueError: It is something else.
    """
    message = clean_all(message)
    if not isinstance(message.get("hosts"), list):
        raise ValueError(  # noqa: TRY004 - a text from elsewhere, not an argument of the wrong type
            f"this is not a result of several hosts: {message!r:.200}"
        )
    found = _from_plain(ClusterReport, message)
    assert isinstance(found, ClusterReport)  # noqa: S101 - for the type checker
    return found


def _to_plain(value: object) -> Fact:
    if isinstance(value, Reading):
        return value.to_json()
    if is_dataclass(value):
        return {one.name: _to_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple):
        return [_to_plain(one) for one in value]
    return cast("Fact", value)


@cache
def _find_hints(kind: type) -> dict[str, object]:
    return get_type_hints(kind, {**vars(cluster_report), "Reading": Reading})


def _from_plain(hint: object, value: Fact) -> object:
    """Return a value of a type, or None if it is none; text is cleaned already."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return None if value is None else _from_plain(kinds[0], value)
    if origin is tuple and isinstance(value, list):
        if kinds[-1] is Ellipsis:
            return tuple(read for one in value if (read := _from_plain(kinds[0], one)) is not None)
        read = tuple(_from_plain(kind, one) for kind, one in zip(kinds, value, strict=False))
        return read if len(value) == len(kinds) and None not in read else None
    if hint is Reading and isinstance(value, dict):
        return Reading.from_json(value)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        known = {
            name: _from_plain(kind, value[name]) for name, kind in _find_hints(hint).items() if name in value
        }
        blank = {
            name: kind()
            for name, kind in _find_hints(hint).items()
            if kind in (str, int, float) and callable(kind)
        }
        return hint(**blank | {name: one for name, one in known.items() if one is not None})
    return _read_scalar(hint, value)


def _read_scalar(hint: object, value: Fact) -> str | float | bool | None:
    if hint is bool or isinstance(value, bool):
        return bool(value) if hint is bool else None
    if hint is float and isinstance(value, int | float):
        return number({"": value}, "")
    if hint is int:
        return whole({"": value}, "")
    is_text = isinstance(value, str) and (hint is str or get_origin(hint) is Literal)
    return text({"": value}, "") if is_text else None
