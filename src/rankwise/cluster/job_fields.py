"""The words of a job: the same in job.toml and as flags, each with its kind and its help."""

from __future__ import annotations

import datetime
import difflib
import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: ``list`` is an array in the file, and a flag that may be repeated; ``command`` is an array or a line, as for a shell;
#: ``table`` is one of NAME = "value", and a flag that may be repeated: --env NAME=value.
Kind = Literal["text", "number", "list", "command", "table", "switch"]
Value = str | int | bool | tuple[str, ...] | dict[str, str]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT](?=i?B?$))i?B?", re.IGNORECASE)
_FACTORS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a job.

    Attributes:
        help: What it means, as one sentence.
        kind: What its value is.
        metavar: How the value is called in the help.
        choices: What it may be; empty: anything.
        is_names: Whether commas stand between its parts: a text for a list is several then, and a list for a text is
            one.
    """

    help: str
    kind: Kind = "text"
    metavar: str = ""
    choices: tuple[str, ...] = ()
    is_names: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Values that have been checked, by word; a word that is not given has none."""

    values: Mapping[str, Value]

    def text(self, word: str, default: str = "") -> str:
        """Return a text."""
        return str(self.values.get(word, default))

    def number(self, word: str, default: int = 0) -> int:
        """Return a number."""
        value = self.values.get(word, default)
        return value if isinstance(value, int) else default

    def is_on(self, word: str) -> bool:
        """Tell whether a switch is on."""
        return self.values.get(word) is True

    def list(self, word: str) -> tuple[str, ...]:
        """Return the parts of a list."""
        value = self.values.get(word, ())
        return value if isinstance(value, tuple) else ()

    def table(self, word: str) -> dict[str, str]:
        """Return a table of texts."""
        value = self.values.get(word, {})
        return dict(value) if isinstance(value, dict) else {}


def read_table(given: Mapping[str, object], words: Mapping[str, Word], where: str, beside: Iterable[str] = ()) -> Table:
    """Check what is given, and bring each value into the form of its word.

    Args:
        given: By word, from a file or from flags; None and empty lists count as not given.
        words: Those that are known.
        where: What stands before a word in errors: ``job.toml: [slurm] ``, or the dashes of a flag.
        beside: What else may stand there, and is checked elsewhere.

    Raises:
        UsageError: A word is unknown, or its value is of another kind.
    """
    values: dict[str, Value] = {}
    for name, value in given.items():
        if value is None or value in ([], ()):
            continue
        word = name.replace("-", "_")
        if word not in words:
            raise UsageError(f"{where}{name}: there is no such word", hint=suggest(word, [*words, *beside]))
        values[word] = _convert(words[word], value, where + (name.replace("_", "-") if where == "--" else name))
    return Table(values)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a hint: the word that may have been meant, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _convert(word: Word, value: object, where: str) -> Value:
    kinds = {
        "text": "a text",
        "number": "a whole number from 0",
        "list": "a list of texts",
        "command": "a list of words",
        "table": 'a table of NAME = "value"',
        "switch": "true or false",
    }
    if isinstance(value, (datetime.date, datetime.time)):
        raise UsageError(f"{where} = {value} is a date or a time of day to TOML", hint=f'put it in quotes: "{value}"')
    value = _to_plain(value)
    if word.is_names and word.kind == "text" and isinstance(value, (str, list)):
        value = ",".join(_split_names(value if isinstance(value, str) else ",".join(map(str, value))))
    found = _read(word, value, where)
    if found is None:
        meant = f"{word.metavar}, {kinds['text']}" if word.kind == "text" and word.metavar else kinds[word.kind]
        raise UsageError(f"{where} = {value!r} is not {meant}")
    if word.choices and found not in word.choices:
        raise UsageError(f"{where} {found!r} is none of {', '.join(word.choices)}")
    return found


def _read(word: Word, value: object, where: str) -> Value | None:
    """Return a value in the form of its word's kind; None if it is of another."""
    found: Value | None = None
    match word.kind, value:
        case "switch", bool():
            found = value
        case _, bool():
            pass  # which is an int to Python
        case "number", int() | str() if re.fullmatch(r"[0-9]+", str(value)):
            found = int(value)
        case "text", int() | str() if str(value).strip():
            found = str(value)
        case "list", str():
            found = _split_names(value) if word.is_names else (value,) if value.strip() else ()
        case "command", str():
            found = _split_command(value, where)
        case "list" | "command", list() | tuple() if all(isinstance(one, (str, int)) for one in value):
            found = tuple(map(str, value))
        case "table", dict() if all(isinstance(one, (str, int, float)) for one in value.values()):
            found = {str(name): _to_text(one) for name, one in value.items()}
        case "table", list() | tuple():
            found = dict(_split_pair(str(one), where) for one in value)
        case _:
            pass
    return found


def _to_plain(value: object) -> object:
    """Return a value with its paths as texts."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_to_plain(one) for one in value]
    return {name: _to_plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _split_command(text: str, where: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{where} {text!r} can't be read: {error}", hint="quote it as a shell does, or give a list"
        ) from error


def _to_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _split_pair(text: str, where: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"{where} {text!r} is not NAME=value")
    return name, value


def parse_duration(text: str, where: str) -> int:
    """Return seconds.

    Args:
        text: ``2:00:00``, ``1-12:00:00`` (days before the dash), ``90m``, ``1h30m`` or ``45s``.
        where: What it is, for the error.

    Raises:
        UsageError: It is none of them. ``90`` and ``2:00`` are none: Slurm reads them as minutes, others as something
            else.
    """
    text = text.strip()
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    elif re.fullmatch(r"(\d+[smhd])+", text):
        total = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))
    else:
        total = 0
    if total <= 0:
        raise UsageError(
            f"{where} {text!r} is not a duration",
            hint="as in 2:00:00 (hours, minutes, seconds), 1-12:00:00, 90m or 45s",
        )
    return total


def parse_size(text: str, where: str) -> int:
    """Return bytes, from ``64G``, ``512MiB`` or ``1000B``.

    Args:
        text: The number, and its unit in powers of 1024, as Slurm and torch count.
        where: What it is, for the error.

    Raises:
        UsageError: It is none, or has no unit: programs differ in what they take it for.
    """
    if re.fullmatch(r"[0-9.]+", text.strip()):
        raise UsageError(
            f"{where} {text!r} has no unit: {text.strip()}G or {text.strip()} bytes?",
            hint=f"write {text.strip()}G, or {text.strip()}B for bytes",
        )
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _FACTORS[(found[2] or "").upper()]) if found else 0
    if size <= 0:
        raise UsageError(f"{where} {text!r} is not an amount of memory", hint="as in 64G")
    return size
