"""Whose fault the end of a rank tells of, by its own words; and those of them that say most."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.base.terminal import strip_escapes
from rankwise.evidence.reader.notes import parse_traceback, split_crash
from rankwise.verdict.error_meanings import Meaning, find_meaning

if TYPE_CHECKING:
    from rankwise.verdict.case import RankEnd

#: A sentence on the terminal; the whole text stands in the traceback and in the log.
_LONGEST = 300
_CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause|During handling of the above exception)[^\n]*\n\n"
)
_NATIVE_FRAME = re.compile(r"(\[rank\d+\]: ?)?(frame #\d+|Exception raised from|<omitting python frames>)")
#: Python's own warnings, rankwise's, and what torch's loggers and those of others say of less than an error.
_PYTHONS_WARNING = re.compile(r".*:\d+: \w*Warning: ")
_ASIDE = re.compile(
    r"(\[rank\d+\]: ?)?\[?[WI]\d{4} |rankwise: (warning|note): |.{0,40}?(?<![=\w])(WARNING|INFO|DEBUG)\b"
)
_ERROR = re.compile(r"what\(\):|(?i:error: )|Error:|(?<![=\w])(ERROR|CRITICAL|FATAL)\b")
#: With the worker's number, and the line below its last frame.
_LOADER = re.compile(
    r"(?s)Caught \w+ in DataLoader worker process (\d+)\.\s*\nOriginal Traceback.*\n  File [^\n]*\n(?: {4}[^\n]*\n)*(\S[^\n]*)"
)


def unwrap(end: RankEnd) -> RankEnd:
    """Put the error of a data-loading worker in the place of the one that only passes it on."""
    found = _LOADER.search(end.fault.message) if end.fault else None
    if found is None or end.fault is None:
        return end
    # The rank's own frames stand before the worker's, in which there may be none of the script.
    stack = parse_traceback(f"{end.fault.callstack}\n{end.fault.message}")
    message = f"{found[2]} (in DataLoader worker {found[1]})"
    where = stack.where if stack else end.fault.where
    return replace(end, fault=replace(end.fault, message=message, where=where))


def find_meaning_of(end: RankEnd) -> Meaning | None:
    """Return what the words of an end mean, as far as they are known."""
    if end.fault is None and end.code is not None and end.code < 0 and end.code != -6:
        return None  # a signal from outside: what stood on its standard error before is beside the point
    if end.fault is None:
        return find_meaning("\n".join(line.strip() for line in _last_lines(end)))
    newest, oldest = find_meaning(end.fault.message), _first_in_chain(end.fault.callstack)
    if oldest is None:
        return newest
    # An error raised on top of another, or in its `finally`: the first one decides whose fault it is.
    meaning = find_meaning(oldest)
    if meaning is None and newest is not None and newest.blame in {"peer", "timeout"}:
        return None
    return meaning or newest


def _last_lines(end: RankEnd) -> list[str]:
    """Return the lines of standard error that tell of the end: it holds warnings from long before, too."""
    # A script that has switched faulthandler on has its stack behind its words.
    text = split_crash(end.last_words)[0].strip() or end.last_words
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    # NCCL's watchdog and C++ errors put their stack behind what they say.
    return [line for line in lines if not _NATIVE_FRAME.match(line.lstrip())][-12:]


def _leave_out_asides(lines: list[str]) -> list[str]:
    """Return the lines that are no warnings and no remarks of loggers."""
    own, at = list[str](), 0
    while at < len(lines):
        if _PYTHONS_WARNING.match(lines[at]):
            # It may have several lines; Python writes that of the source behind it.
            source = next((n for n in range(at + 1, len(lines)) if lines[n].startswith("  ")), at)
            at = source + 1
        else:
            own += [lines[at]] if not _ASIDE.match(lines[at]) else []
            at += 1
    return own


def _first_in_chain(callstack: str) -> str | None:
    """Return the text of the exception that others were raised upon; None if there is one only."""
    links = _CHAINED.split(callstack)
    if len(links) < 2:
        return None
    return "\n".join(line for line in links[0].splitlines()[-20:] if not line.startswith("  "))


def find_blame(end: RankEnd) -> str:
    """Return whose fault an end tells of: what is not known is the rank's own."""
    meaning = find_meaning_of(end)
    return meaning.blame if meaning else "own"


def say(end: RankEnd) -> str:
    """Return who ended, with the line that says most."""
    return f"rank {end.rank}: {first_line(end)}"


def first_line(end: RankEnd) -> str:
    """Return the line of an error that says most."""
    if end.fault:
        return _trim(end.fault.message.strip().split("\n")[0])
    lines = _leave_out_asides(_last_lines(end))
    parts = [line for line in lines if _ERROR.search(line)]
    return _trim((parts[-1] if parts else lines[-1] if lines else "").strip())


def _trim(text: str) -> str:
    """Leave out what tells the reader nothing: torch's prefix, paths of the machine that built it, advice."""
    text = re.sub(r"^\[rank\d+\]: ", "", strip_escapes(text))
    text = re.sub(r"/\S*/([\w.]+\.(?:cc|cpp|cu|h|hpp):\d+)", r"\1", text).removeprefix("what():").strip()
    text = text.partition(" This is typically caused by")[0]
    return text if len(text) <= _LONGEST else text[:_LONGEST].rpartition(" ")[0] + " …"
