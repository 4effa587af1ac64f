"""The report as text: the first cause on top, the casualties below it."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.base.terminal import NARROWEST, strip_escapes

if TYPE_CHECKING:
    from rankwise.verdict.case import Casualty, Verdict
    from rankwise.verdict.finding import JobFinding, Waiting

_TAIL_LINES = 12
_LONGEST_DETAIL = 120
_MOST_ROWS = 6
_MOST_PLACES = 12
#: Where what stands behind a label begins.
_MARGIN = 11
_LONG_S = 60.0  # what waits for so long is shown with its fix
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")


def render(
    verdict: Verdict,
    *,
    attempt: int = 0,
    allowed: int | None = None,
    colour: bool = False,
    width: int | None = None,
) -> str:
    """Return the report as lines for a terminal or a log file.

    Args:
        verdict: What happened.
        attempt: Which attempt it was, from 0.
        allowed: How many there may be, when another one follows; None when the job ends with this one.
        colour: Whether to use a terminal's colours.
        width: Of the terminal, whose lines long sentences are broken into; None for a file, which keeps a sentence in a
            line.
    """
    paint = _paint if colour else _plain
    lines = [paint("bold red", f"rankwise: {_head(verdict, attempt, allowed)}")]

    def row(label: str, text: str, style: str = "") -> None:
        if text := strip_escapes(text):
            message = [paint(style, line) if style else line for line in _wrap(text, width)]
            lines.append(f"  {label:<9}" + f"\n{' ' * _MARGIN}".join(message))

    row("first", verdict.message, "bold")
    row("where", verdict.where or "")
    row("why", _leave_out_known(verdict.reason))
    if verdict.fix:
        row("class", verdict.class_id or "")
        row("do", verdict.fix, "green")
        row("more", f"rankwise rule {verdict.rule}" if verdict.rule else "")
    lines += _quote(_shorten(verdict.traceback))
    lines += _quote(shorten_tail(verdict), title="last lines of its stderr")
    for number, text in enumerate(_join_casualties(verdict.casualties)):
        row("" if number else "others", text)
    for number, text in enumerate(_join_waiting(verdict.waiting)):
        row("" if number or verdict.casualties else "waited", text, "dim")
    logs = [path for rank, path in sorted(verdict.logs.items()) if rank in verdict.culprits]
    more = f" (and {len(logs) - 1} more beside it)" if len(logs) > 1 else ""
    row("log", logs[0] + more if logs else "")
    lines += ["  " + f"\n{' ' * _MARGIN}".join(_wrap(note, width)) for note in verdict.notes]
    return "\n".join(lines)


def _wrap(text: str, width: int | None) -> list[str]:
    """Break a sentence between words; a path stays whole, so that it can be clicked."""
    if width is None or width < NARROWEST:
        return [text]
    room = width - _MARGIN
    broken = [textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    return [line for lines in broken for line in lines]


def render_finding(finding: JobFinding, *, now_s: float | None = None) -> str:
    """Return what is seen of ranks that still run as one line for the terminal.

    Args:
        finding: What is seen.
        now_s: The moment, on the host's monotonic clock; without it the line does not tell for how long.
    """
    waited_s = -1.0 if now_s is None or finding.since_s is None else now_s - finding.since_s
    waited = f" (for {waited_s:.0f} s now)" if waited_s >= 0 else ""
    text = "" if finding.is_proof or finding.kind == "mismatch" else "; it may just be slow"
    if text and finding.doing == "ended":
        text = "; this may be intended, if the script handles the exception that ends the wait"
    if text and finding.fix and waited_s >= _LONG_S:
        text += f"; if not: {finding.fix}"
    if not text and not finding.is_stuck and finding.kind == "hang" and finding.fix:  # no report of it will follow
        text = f"; {finding.fix}"
    # What may be right is no failure of any class.
    named = f" [{finding.class_id}]" if finding.class_id and not text else ""
    return strip_escapes(f"{finding.message}{waited}{text}{named}").replace("\n", " ")


def _head(verdict: Verdict, attempt: int, allowed: int | None) -> str:
    kind = {"failure": "failed", "hang": "hung", "mismatch": "failed: the ranks diverged"}
    what = "was stopped" if verdict.stopped_by else kind.get(verdict.kind, verdict.kind)
    if verdict.kind == "mismatch" and verdict.exit_code == 0:
        what = "finished, but the ranks diverged"
    if allowed is not None:
        return f"attempt {attempt + 1} of {allowed} {what}"
    return f"the job {what}" + (f", after {attempt + 1} attempts" if attempt else "")


def _leave_out_known(reason: str) -> str:
    """Return a reason without what the first row has said: a bare exit code, the name of the signal."""
    return re.sub(r"^(exit code \d+\Z|killed by \S+ \(-?\d+\)(: )?)", "", reason)


def _shorten(traceback: str, most: int = 40) -> str:
    lines = traceback.rstrip().splitlines()
    if len(lines) <= most:
        return "\n".join(lines)
    cut = len(lines) - most
    return "\n".join([*lines[:4], f"  … {cut} lines omitted, see the log …", *lines[4 + cut :]])


def shorten_tail(verdict: Verdict) -> str:
    """Return the last lines that the first culprit wrote, without what its traceback says anyway."""
    known = {line.strip() for line in verdict.traceback.splitlines()}
    # torch puts "[rank3]: " before each line of a traceback.
    clean = [_RANK_PREFIX.sub("", strip_escapes(line)) for line in verdict.last_words.splitlines()]
    lines = [line for line in clean if line.strip() and line.strip() not in known and set(line.strip()) - set("~^")]
    if len(lines) == 1 and lines[0].strip() in verdict.message:
        return ""
    return "\n".join(lines[-_TAIL_LINES:])


def _quote(text: str, title: str = "") -> list[str]:
    if not text:
        return []
    head = [f"  {title}:"] if title else []
    return [*head, *(f"    | {line}" for line in strip_escapes(text).splitlines())]


def _join_waiting(waiting: tuple[Waiting, ...]) -> list[str]:
    groups: dict[tuple[str | None, str | None], list[int]] = {}
    for one in waiting:
        groups.setdefault((one.op, one.where), []).append(one.rank)
    lines = []
    for (op, where), ranks in groups.items():
        doing = f"in {op} " if op else ""
        lines.append(f"{name_ranks(ranks)} {'were' if len(ranks) > 1 else 'was'} {doing}at {where}")
    more = len(lines) - _MOST_PLACES
    return lines if more < 1 else [*lines[:_MOST_PLACES], f"and others at {more} more place{'s' * (more > 1)}"]


def _join_casualties(casualties: tuple[Casualty, ...]) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = {}
    for casualty in casualties:
        detail = casualty.detail
        detail = f"{detail[:_LONGEST_DETAIL].rstrip()} …" if len(detail) > _LONGEST_DETAIL else detail
        groups.setdefault((casualty.fate, detail), []).append(casualty.rank)
    texts = []
    for (fate, detail), ranks in groups.items():
        text = fate.replace("its peer", "their peer") if len(ranks) > 1 else fate
        texts.append(f"{name_ranks(ranks)} {text}" + (f" ({detail})" if detail else ""))
    more = len(texts) - _MOST_ROWS
    return texts if more < 1 else [*texts[:_MOST_ROWS], f"and {more} more, each different"]


_CODES = {"bold": "1", "bold red": "1;31", "green": "32", "dim": "2"}


def _paint(style: str, text: str) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def _plain(_style: str, text: str) -> str:
    return text
