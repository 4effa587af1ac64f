"""What the forms for people share: the line that tells a finding, the line of counts, colours, safe text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.finding import Finding, Span

Style = Literal["bold", "red", "yellow", "cyan", "blue", "green"]
_CODES: dict[Style, str] = {
    "bold": "1", "red": "1;31", "yellow": "1;33", "cyan": "1;36", "blue": "34", "green": "32",
}  # fmt: skip
SEVERITY_STYLE: dict[str, Style] = {"error": "red", "warning": "yellow", "hint": "cyan"}


def paint(text: str, style: Style, *, color: bool) -> str:
    """Return the text in a colour, if colours are wanted."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if color and text else text


def safe(text: str) -> str:
    """Return a text as one line that does nothing to a terminal: a source may hold escape sequences."""
    return "".join(char if char.isprintable() else visible(char) for char in text)


def visible(char: str) -> str:
    """Return a sign of one column for a character that can't be printed."""
    if char in " \u3000\xa0":
        return char
    # Unicode has a picture for each ASCII control character.
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else "\N{REPLACEMENT CHARACTER}"


def place(path: str, span: Span, cell: int | None) -> str:
    """Return where something stands: ``train.py:12:5``, ``notes.ipynb:cell 3:1:5``."""
    middle = "" if cell is None else f"cell {cell}:"
    return f"{safe(path)}:{middle}{span.line}:{span.col}"


def head(one: Finding, *, color: bool) -> str:
    """Return the line that tells a finding: where, how bad, which rule and class, what."""
    where = paint(place(one.path, one.span, one.cell), "bold", color=color)
    kind = paint(f"{one.severity} {one.rule}", SEVERITY_STYLE[one.severity], color=color)
    of_class = f" ({one.failure_class})" if one.failure_class else ""
    return f"{where}: {kind}{of_class}: {safe(one.message)}"


def summary(findings: Sequence[Finding]) -> str:
    """Return the counts: ``3 findings: 2 errors, 1 hint; `--fix` mends 1``."""
    if not findings:
        return "no findings"
    by_severity = Counter(one.severity for one in findings)
    counts = ", ".join(
        count(by_severity[severity], severity) for severity in ("error", "warning", "hint") if by_severity[severity]
    )
    # A command that was typed is no file: there `--fix` can only be read.
    fixable = sum(1 for one in findings if one.edits and not one.path.startswith("<"))
    return f"{count(len(findings), 'finding')}: {counts}" + (f"; `--fix` fixes {fixable}" if fixable else "")


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 error``, ``2 errors``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
