"""Comments that say "I know": ``# noqa``, ``# noqa: RW101`` and ``# rankwise: noqa`` for a whole file."""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.lint.code_unit import CodeUnit
    from rankwise.lint.finding import Span

_CODES = r"[A-Za-z]+[0-9]+(?:(?:\s*,\s*|\s+)[A-Za-z]+[0-9]+)*"
_LINE = re.compile(rf"#\s*noqa\b(?:\s*:\s*({_CODES})?)?", re.IGNORECASE)
_FILE = re.compile(rf"#\s*rankwise\s*:\s*noqa\b(?:\s*:\s*({_CODES})?)?", re.IGNORECASE)
_NO_CODE = frozenset({tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER})
#: What a comment without ids silences: every id begins with it.
_ALL = frozenset({""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressions:
    """What the comments of a text silence.

    Attributes:
        everywhere: Beginnings of ids that are silenced in the whole text.
        lines: Beginnings of ids, by line (from 1).
    """

    everywhere: frozenset[str]
    lines: dict[int, frozenset[str]]

    def hides(self, rule: str, span: Span) -> bool:
        """Whether a finding of ``rule`` is silenced: its first line, or its last, belongs to a commented statement."""
        at = (self.everywhere, *(self.lines.get(line, frozenset()) for line in (span.line, span.end_line)))
        return any(rule.startswith(start) for starts in at for start in starts)


def find_suppressions(unit: CodeUnit) -> Suppressions:
    """Read the comments of a piece; a comment anywhere in a statement holds for all of its lines."""
    everywhere, lines = frozenset[str](), dict[int, frozenset[str]]()
    if "noqa" not in unit.code.lower():
        return Suppressions(everywhere=everywhere, lines=lines)
    found = _shell_comments(unit.lines) if unit.language == "shell" else _python_comments(unit)
    for comment, first, last in found:
        if whole := _FILE.search(comment):
            everywhere |= _to_starts(whole[1])
        elif here := _LINE.search(comment):
            starts = _to_starts(here[1])
            for line in range(first, last + 1):
                lines[line] = lines.get(line, frozenset()) | starts
    return Suppressions(everywhere=everywhere, lines=lines)


def _to_starts(codes: str | None) -> frozenset[str]:
    return frozenset(re.split(r"[\s,]+", codes.upper())) if codes else _ALL


def _python_comments(unit: CodeUnit) -> Iterable[tuple[str, int, int]]:
    """Give each comment with the first and the last line of its statement."""
    found, waiting, first = list[tuple[str, int, int]](), list[str](), 0
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(unit.lines)).readline):
            if token.type == tokenize.COMMENT and first:
                waiting.append(token.string)
            elif token.type == tokenize.COMMENT:
                found.append((token.string, token.start[0], token.start[0]))
            elif token.type == tokenize.NEWLINE:
                found += [(comment, first, token.start[0]) for comment in waiting]
                waiting, first = [], 0
            elif token.type not in _NO_CODE:
                first = first or token.start[0]
    except (tokenize.TokenError, SyntaxError):
        # No Python: the one finding on such a text can be silenced all the same.
        return _plain_comments(unit.lines)
    return found


def _plain_comments(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    for number, line in enumerate(lines, start=1):
        if "#" in line:
            yield line[line.index("#") :], number, number


def _shell_comments(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Give each comment with the lines of its command, which a backslash carries on."""
    first = 1
    for number, line in enumerate(lines, start=1):
        if (at := _find_shell_comment(line)) is not None:
            yield line[at:], first, number
        if not line.endswith("\\"):
            first = number + 1


def _find_shell_comment(line: str) -> int | None:
    """Where a comment begins: a # at the front of a word, outside of quotes."""
    quote, is_front, skips = "", True, False
    for at, char in enumerate(line):
        if skips:
            skips = False
        elif char == "\\" and quote != "'":
            skips = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and is_front:
            return at
        is_front = char in " \t;&|("
    return None
