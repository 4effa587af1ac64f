"""For people: each finding with its source line and what to do.

train.py:14:9: error RW101 (C1): only rank 0 reaches this barrier
   |
14 |         dist.barrier()
   |         ^^^^^^^^^^^^^^
   note: train.py:16:1: the others go on to this line
16 | dist.all_reduce(total)
   | ^^^^^^^^^^^^^^^^^^^^^^
   -> move the barrier out of the branch
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rankwise.base import terminal
from rankwise.lint.reporters.text_form import SEVERITY_STYLE, Style, head, paint, place, safe, summary, visible

if TYPE_CHECKING:
    from rankwise.lint.finding import Finding, Span

#: Gives the lines of a file, or of one cell of a notebook, from 1.
LinesOf = Callable[[str, "int | None"], Sequence[str]]
_TAB = 4
#: Where there is no terminal: a line of a log, not of a minified file.
_WIDTH = 160
#: What is kept before the place that is marked, where a line is cut.
_BEFORE = 24
_CUT = "…"


def render(
    findings: Sequence[Finding],
    *,
    lines_of: LinesOf,
    color: bool = False,
    width: int | None = None,
    with_summary: bool = True,
) -> str:
    """Return the findings with their source lines, an empty line after each, and the line of counts."""
    blocks = [render_one(one, lines_of=lines_of, color=color, width=width) for one in findings]
    if with_summary:
        blocks.append(paint(summary(findings), "bold", color=color))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def render_one(one: Finding, *, lines_of: LinesOf, color: bool, width: int | None) -> str:
    """Return one finding, without a line break at its end."""
    spans = [one.span, *(span for _, _, span in one.also)]
    gutter = len(str(max(span.end_line for span in spans)))
    columns = max((width or _WIDTH) - gutter - 3, 30)
    source = _Source(lines_of, gutter, columns, color)
    margin = " " * gutter
    lines = [head(one, color=color)]
    shown = source.show(one.path, one.cell, one.span, SEVERITY_STYLE[one.severity])
    lines += [paint(f"{margin} |", "blue", color=color), *shown] if shown else []
    for word, path, span in one.also:
        cell = one.cell if path == one.path else None
        lines.append(f"{margin} {paint('note:', 'blue', color=color)} {place(path, span, cell)}: {safe(word)}")
        lines += source.show(path, cell, span, "blue")
    if one.fix:
        lines.append(f"{margin} {paint('->', 'green', color=color)} {safe(one.fix)}")
    return terminal.wrap("\n".join(lines), width)


class _Source(NamedTuple):
    """How source lines are shown."""

    lines_of: LinesOf
    gutter: int
    columns: int
    color: bool

    def show(self, path: str, cell: int | None, span: Span, style: Style) -> list[str]:
        """Return a stretch's lines with marks below them: the first one and, of several, the last one."""
        source = self.lines_of(path, cell)
        if not 1 <= span.line <= len(source):
            return []
        if span.end_line <= span.line:
            return self._show_line(source, span.line, span.col, span.end_col, style)
        shown = self._show_line(source, span.line, span.col, None, style)
        last = min(span.end_line, len(source))
        if last > span.line + 1:
            shown.append(paint(" " * self.gutter + " :", "blue", color=self.color))
        if last > span.line:
            text = source[last - 1]
            shown += self._show_line(source, last, len(text) - len(text.lstrip()) + 1, span.end_col, style)
        return shown

    def _show_line(self, source: Sequence[str], number: int, col: int, end_col: int | None, style: Style) -> list[str]:
        text = source[number - 1].rstrip()
        shown, start, end = mark(text, col - 1, len(text) if end_col is None else end_col - 1, columns=self.columns)
        before = paint(f"{number:>{self.gutter}} |", "blue", color=self.color)
        below = paint(" " * self.gutter + " |", "blue", color=self.color)
        marks = paint("^" * (end - start), style, color=self.color)
        return [f"{before} {shown}".rstrip(), f"{below} {' ' * start}{marks}"]


def mark(text: str, start: int, end: int, *, columns: int) -> tuple[str, int, int]:
    """Return a line as a terminal shows it, and the columns (from 0) between which a stretch of it stands.

    Args:
        text: The line, as it stands in the file.
        start: Character at which the stretch begins, from 0.
        end: The first one behind it.
        columns: What fits; a longer line is cut before or behind the stretch.
    """
    start = min(max(start, 0), len(text))
    end = min(max(end, start), len(text))
    cells, at = list[str](), list[int]()
    column = 0
    for char in text:
        at.append(column)
        cells.append(_show(char, column))
        column += _count_columns(cells[-1])
    at.append(column)
    first, last = 0, len(text)
    if column > columns:
        # The marked stretch shall be seen, with a little of what is before it.
        while at[start] - at[first] > _BEFORE and at[last] - at[first] > columns - 2:
            first += 1
        while at[last] - at[first] > columns - 2 and last > first + 1:
            last -= 1
    shown = (_CUT if first else "") + "".join(cells[first:last]) + (_CUT if last < len(text) else "")
    shift = (1 if first else 0) - at[first]
    left = at[start] + shift
    right = at[min(end, last)] + shift
    return shown, left, max(right, left + 1)


def _show(char: str, column: int) -> str:
    if char == "\t":
        return " " * (_TAB - column % _TAB)
    return char if char.isprintable() or unicodedata.combining(char) else visible(char)


def _count_columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.combining(char) or unicodedata.category(char) in {"Mn", "Me", "Cf"}
        else 2
        if unicodedata.east_asian_width(char) in {"W", "F"}
        else 1
        for char in text
    )
