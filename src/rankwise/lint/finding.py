"""What a rule has found, and where: `Finding`, `Span`, `Edit`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable

    from rankwise.base.findings import Severity


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A stretch of text: lines from 1, columns from 1 in characters, the end column is the first one behind it."""

    line: int
    col: int
    end_line: int
    end_col: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Text that takes the place of a stretch; an empty stretch inserts."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule saw: where, what happens and what to do; the rest as in `Finding`."""

    at: ast.AST | Span
    message: str
    fix: str
    _: KW_ONLY
    severity: Severity | None = None
    failure_class: str | None = None
    also: Iterable[tuple[str, str, Span]] = ()
    edits: Iterable[Edit] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake in one place.

    Attributes:
        rule: Id of the rule, ``RW101``.
        failure_class: Id in docs/reference/failure-classes.md, or an empty string.
        severity: ``error`` breaks, hangs or is silently wrong; ``warning`` does so in some settings; ``hint``.
        message: What happens, with the user's own names, in one line.
        fix: What to do, in the user's own names, in one line.
        path: The file as the user named it.
        span: Where, in the file (in the cell of a notebook).
        cell: Number of the notebook's cell, from 1; None elsewhere.
        also: Other places that belong to it, each with a word: ``("rank 1 goes on to this line", path, span)``.
        edits: What ``--fix`` does; empty where no fix is safe.
    """

    rule: str
    failure_class: str
    severity: Severity
    message: str
    fix: str
    path: str
    span: Span
    cell: int | None = None
    also: tuple[tuple[str, str, Span], ...] = ()
    edits: tuple[Edit, ...] = field(default=())


def span_of(node: ast.AST, lines: list[str]) -> Span:
    """Where a node stands; `ast` counts columns in UTF-8 bytes from 0, a Span in characters from 1."""
    line, end_line = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
    col, end_col = node.col_offset, node.end_col_offset or node.col_offset  # type: ignore[attr-defined]
    return Span(line, _chars(lines, line, col), end_line, _chars(lines, end_line, end_col))


def _chars(lines: list[str], line: int, offset: int) -> int:
    text = lines[line - 1] if line <= len(lines) else ""
    return (offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))) + 1
