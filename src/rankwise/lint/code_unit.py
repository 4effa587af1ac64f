"""A piece of code to check: a whole file, the code of a notebook or of a Markdown page, or a command line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from rankwise.lint.finding import Finding, Span

Language = Literal["python", "shell"]


@dataclass(frozen=True, kw_only=True)
class CodeUnit:
    """Code of one language, with its way back to the file it stands in.

    Attributes:
        path: The file as the user named it; ``<command>`` for a command line.
        language: What to read it as.
        code: What is analysed. Lines are numbered as in the file wherever that is possible (a Markdown page keeps its
            line numbers: what is not code is blank); a notebook's cells stand one below the other.
        cells: For a notebook: for each line of ``code`` (from 0) its cell and its line in that cell, both from 1.
        indents: Characters cut from the front of a line of ``code`` (numbered from 1), where any were: a list's
            indent or a prompt in a Markdown page, the mark of a shell line in a notebook.
        is_fragment: Whether names may be missing: a page's fence or a cell continues others.
        num_ranks: How many processes of it the command that is checked starts on a node.
    """

    path: str
    language: Language
    code: str
    cells: tuple[tuple[int, int], ...] = ()
    indents: dict[int, int] = field(default_factory=dict)
    is_fragment: bool = False
    num_ranks: int = 1

    @cached_property
    def lines(self) -> list[str]:
        """The code's lines as Python's parser counts them (not at form feeds or U+2028), without their ends."""
        return self.code.replace("\r\n", "\n").replace("\r", "\n").split("\n")

    def place(self, span: Span) -> tuple[Span, int | None]:
        """Where a stretch of ``code`` stands in the file, and in which cell."""
        end_line, end_col = span.end_line, span.end_col + self.indents.get(span.end_line, 0)
        col = span.col + self.indents.get(span.line, 0)
        if not self.cells:
            return Span(span.line, col, end_line, end_col), None
        cell, line = self._at(span.line)
        end_cell, end_line = self._at(end_line)
        if end_cell != cell:
            # A stretch has one cell: it is cut at its first line.
            end_line, end_col = line, max(end_col, col) if end_line == line else col
        return Span(line, col, end_line, end_col), cell

    def place_finding(self, finding: Finding) -> Finding:
        """A finding in this piece's code, as one in the file; places in other files stay as they are."""
        span, cell = self.place(finding.span)
        also = tuple(
            (text, path, self.place(other)[0] if path == self.path else other) for text, path, other in finding.also
        )
        edits = tuple(replace(edit, span=self.place(edit.span)[0]) for edit in finding.edits)
        return replace(finding, span=span, cell=cell, also=also, edits=edits)

    def _at(self, line: int) -> tuple[int, int]:
        return self.cells[min(max(line, 1), len(self.cells)) - 1]
