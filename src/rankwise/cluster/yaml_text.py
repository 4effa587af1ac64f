"""Values as YAML, as a person would write it; no package is needed for that, and kubectl reads it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_WIDTH = 100
#: What needs no quotes: it can't be taken for a number, a truth value, a date or a piece of syntax.
_PLAIN = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)$)(?:-{1,2}(?=[a-z]))?[A-Za-z/](?:[A-Za-z0-9_./=-]|:(?=\w))*",
    re.IGNORECASE,
)


def to_yaml(value: Mapping[str, object]) -> str:
    """Return a mapping as a YAML document."""
    return "\n".join(_write_mapping(value, 0)) + "\n"


def _write_mapping(value: Mapping[str, object], depth: int) -> Iterator[str]:
    for key, one in value.items():
        start = f"{'  ' * depth}{_scalar(key)}:"
        if isinstance(one, dict) and one:
            yield start
            yield from _write_mapping(one, depth + 1)
        elif isinstance(one, list) and any(isinstance(part, dict) or _is_block(part) for part in one):
            yield start
            yield from _write_list(one, depth)
        elif isinstance(one, list):
            yield from _write_words(start, one, depth)
        elif _is_block(one):
            yield from _write_block(start, str(one), depth)
        else:
            yield f"{start} {_scalar(one)}"


def _write_list(values: Sequence[object], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for one in values:
        if isinstance(one, dict) and one:
            first, *rest = _write_mapping(one, depth + 1)
            yield f"{pad}- {first.lstrip()}"
            yield from rest
        elif _is_block(one):
            yield from _write_block(f"{pad}-", str(one), depth)
        else:
            yield f"{pad}- {_scalar(one)}"


def _write_block(start: str, text: str, depth: int) -> Iterator[str]:
    yield f"{start} |"
    yield from ("  " * (depth + 1) + line if line else "" for line in text.splitlines())


def _write_words(start: str, values: Sequence[object], depth: int) -> Iterator[str]:
    line = f"{start} ["
    for number, one in enumerate(values, 1):
        word = _scalar(one) + ("," if number < len(values) else "]")
        if len(line) + len(word) > _WIDTH:
            yield line.rstrip()
            line = "  " * (depth + 1)
        line += word + " "
    yield line.rstrip() if values else f"{start} []"


def _is_block(value: object) -> bool:
    """Tell whether a value is a text of several lines that can stand as it is."""
    lines = value.split("\n") if isinstance(value, str) else []
    has_form = len(lines) > 2 and not lines[-1] and bool(lines[-2]) and not lines[0][:1].isspace()
    return has_form and bool(lines[0]) and all(line.isprintable() for line in lines)


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
