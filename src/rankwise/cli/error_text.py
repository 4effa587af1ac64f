"""The error texts that are known in a pasted line or in a log: who is at fault for each, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from rankwise.base.rank_names import name_ranks
from rankwise.base.terminal import strip_escapes
from rankwise.cli.pages import find_quoting
from rankwise.verdict.error_meanings import MEANINGS, Blame, Meaning, find_fix, find_meaning, find_missing

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What is read of a log: the errors are at its end.
LONGEST_LOG = 8 << 20
#: Causes first, and then those that only suffered from them.
_ORDER: tuple[Blame | None, ...] = ("own", "mismatch", "timeout", "peer", None)
_PRINTED_BY = re.compile(r"\[(?:rank|default)(\d+)\]")
_LONGEST_LINE = 200
#: A traceback, in lines.
_LONGEST_PASTED = 100
#: Who is at fault, and what to do where the text itself does not say.
AT_FAULT: dict[Blame, tuple[str, str]] = {
    "own": ("the rank that printed it", ""),
    "peer": (
        "another rank, which had left before; the one that printed this only lost its connection",
        "find the rank that left first: `rankwise run` names it; in a log, look for the earliest error that is not of this kind",
    ),
    "timeout": (
        "a rank that did not arrive, not the one that printed this",
        "find out what the other ranks were doing: `rankwise run` says so, and so does `rankwise why PID` while the job hangs",
    ),
    "mismatch": (
        "the ranks' calls differ: the text does not say whose is wrong",
        "compare the collectives of the ranks, in their order",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownText:
    """An error text in a log.

    Attributes:
        line: Number of the line that it begins in, from 1.
        text: That line.
        rank: Who printed it, if the launcher or torch wrote that before the line.
        blame: As in `rankwise.verdict.error_meanings`; None if only a page of a failure class quotes it.
        missing: The ranks that it names as absent.
        classes: The failure classes that it fits.
        fix: What to do.
    """

    line: int
    text: str
    rank: int | None
    blame: Blame | None
    missing: tuple[int, ...]
    classes: tuple[str, ...]
    fix: str

    @property
    def at_fault(self) -> str:
        """Who is to be looked at."""
        if self.missing:
            return f"{name_ranks(self.missing)}, which did not arrive"
        by = f", rank {self.rank}" if self.blame == "own" and self.rank is not None else ""
        return AT_FAULT[self.blame][0] + by if self.blame else ""


def find_known(text: str) -> list[KnownText]:
    """Return the known error texts, each kind once, causes before those that suffered from them."""
    text = strip_escapes(text)
    found = {  # the first of each kind
        (meaning.blame, meaning.class_id, meaning.fix): (start, end, meaning)
        for start, end, meaning in reversed(_match_all(text))
    }
    known = [_describe(text, *place) for place in found.values()]
    if not known:
        known = [*_find_own(text), *_find_quoted(text)][:1]
    return sorted(known, key=lambda one: (_ORDER.index(one.blame), one.line))


def read_log(stream: BinaryIO) -> tuple[str, int]:
    """Return the end of a log, and how many lines stand before it."""
    kept, left_out = b"", 0
    while chunk := stream.read(1 << 20):
        kept += chunk
        if len(kept) > LONGEST_LOG:
            left_out += kept.count(b"\n", 0, len(kept) - LONGEST_LOG)
            kept = kept[-LONGEST_LOG:]
    return kept.decode("utf-8", "replace"), left_out


def _match_all(text: str) -> list[tuple[int, int, Meaning]]:
    """Return where known texts begin and end, ascending.

    Of patterns that match at one place, the first in the table counts.
    """
    found: list[tuple[int, int, Meaning]] = []
    taken = bytearray(len(text))
    for meaning in MEANINGS:
        for match in meaning.pattern.finditer(text):
            start, end = match.span()
            if 1 not in taken[start:end]:
                taken[start:end] = b"\1" * (end - start)
                found.append((start, end, meaning))
    return sorted(found, key=lambda each: each[0])


def _describe(text: str, start: int, end: int, meaning: Meaning) -> KnownText:
    begin = text.rfind("\n", 0, start) + 1
    line = text[begin:].partition("\n")[0].strip()
    by = _PRINTED_BY.search(line)
    return KnownText(
        line=text.count("\n", 0, start) + 1,
        text=line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …",
        rank=int(by[1]) if by else None,
        blame=meaning.blame,
        missing=find_missing(text[start:end]),
        classes=(meaning.class_id,) if meaning.class_id else (),
        fix=find_fix(text[start:], meaning) or AT_FAULT[meaning.blame][1],
    )


def _find_own(text: str) -> Iterator[KnownText]:
    """Find an error of ours that was pasted without its type."""
    typed = f"rankwise.HandshakeError: {text.strip()}"
    meaning = find_meaning(typed)
    if meaning:
        yield replace(_describe(typed, 0, len(typed), meaning), text=_last_line(text))


def _find_quoted(text: str) -> Iterator[KnownText]:
    """Find what only the pages of the failure classes quote; in a log, such short words say little."""
    if text.count("\n") < _LONGEST_PASTED and (classes := find_quoting(text)):
        yield KnownText(line=1, text=_last_line(text), rank=None, blame=None, missing=(), classes=classes, fix="")


def _last_line(text: str) -> str:
    """Return the line of a traceback that names the error."""
    return text.strip().splitlines()[-1].strip()
