"""Where the source of each cell stands in a notebook's JSON, so that it can be changed and nothing else is."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPACE = re.compile(r"[ \t\r\n]*")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A value in the JSON: what it is, and between which characters it stands."""

    value: Any
    start: int
    end: int


@final
class Cells:
    """The text of a notebook, and the sources in it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def source(self, number: int) -> str | None:
        """Return the source of a cell, counted from 1; None if there is no such cell."""
        found = self._find(number)
        if found is None:
            return None
        return found.value if isinstance(found.value, str) else "".join(map(str, found.value))

    def replace(self, number: int, source: str) -> None:
        """Give a cell another source, written as the old one is: one string, or a list of lines."""
        found = self._find(number)
        if found is None or self.source(number) == source:
            return
        old = self.text[found.start : found.end]
        new = _write_list(old, source) if isinstance(found.value, list) else _write(source, old)
        self.text = self.text[: found.start] + new + self.text[found.end :]

    def _find(self, number: int) -> _Value | None:
        try:
            cells = next(start for key, start in _members(self.text, 0) if key == "cells")
            cell = next(start for at, start in enumerate(_items(self.text, cells), 1) if at == number)
            start = next(start for key, start in _members(self.text, cell) if key == "source")
        except (StopIteration, ValueError):
            return None
        value, end = json.JSONDecoder().raw_decode(self.text, start)
        return _Value(value=value, start=start, end=end) if isinstance(value, str | list) else None


def _members(text: str, at: int) -> Iterator[tuple[str, int]]:
    """Walk through an object: each key, and where its value begins."""
    for start in _entries(text, at, "{", "}"):
        key, end = json.JSONDecoder().raw_decode(text, start)
        colon = _skip(text, end)
        yield str(key), _skip(text, colon + 1)


def _items(text: str, at: int) -> Iterator[int]:
    """Walk through a list: where each value begins."""
    return _entries(text, at, "[", "]")


def _entries(text: str, at: int, opening: str, closing: str) -> Iterator[int]:
    at = _skip(text, at)
    if text[at : at + 1] != opening:
        raise ValueError(f"expected {opening} at character {at}")
    at = _skip(text, at + 1)
    while text[at : at + 1] != closing:
        yield at
        decoder = json.JSONDecoder()
        _, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] == ":":  # it was a key
            _, at = decoder.raw_decode(text, _skip(text, at + 1))
            at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _write_list(old: str, source: str) -> str:
    """Return a list of lines in the layout of the old one; a line that stays keeps its letters."""
    starts = list(_items(old, 0))
    decoder = json.JSONDecoder()
    written, end = dict[str, str](), 1
    for start in starts:
        value, end = decoder.raw_decode(old, start)
        written[str(value)] = old[start:end]
    before = old[1 : starts[0]] if starts else ""
    lines = [written.get(line) or _write(line, old) for line in _LINE.findall(source)]
    between = re.sub(r"\S", "", before)
    if len(starts) > 1:
        _, first_end = decoder.raw_decode(old, starts[0])
        separator = old[first_end : starts[1]]
    else:
        separator = "," + (between or " ")
    return f"[{before}{separator.join(lines)}{old[end:]}"


def _write(text: str, old: str) -> str:
    return json.dumps(text, ensure_ascii=old.isascii() and "\\u" in old)
