"""What was found, in the form that is asked for: text for people, one line each, JSON, SARIF, GitHub's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from rankwise.base.errors import UsageError
from rankwise.lint.reporters import concise, github, json_list, sarif, text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.lint.finding import Finding
    from rankwise.lint.reporters.text import LinesOf

Format = Literal["text", "concise", "json", "sarif", "github"]
FORMATS: tuple[str, ...] = get_args(Format)


def render(
    findings: Sequence[Finding],
    format: str,  # noqa: A002 - the name of the flag
    *,
    lines_of: LinesOf,
    color: bool = False,
    width: int | None = None,
    root: Path | None = None,
) -> str:
    """Return the findings as text that ends with a line break, or as no text at all.

    Args:
        findings: In the order in which they are shown.
        format: One of `FORMATS`.
        lines_of: Gives the lines of a file (of one cell, of a notebook), without their ends; none if it can't be read.
        color: Whether to use ANSI colours (text and concise only).
        width: Columns of the terminal, to which source lines are cut; None where there is none.
        root: What the paths in SARIF are relative to; the current folder if None.

    Raises:
        UsageError: There is no such format.
    """
    match format:
        case "text":
            return text.render(findings, lines_of=lines_of, color=color, width=width)
        case "concise":
            return concise.render(findings, color=color)
        case "sarif":
            return sarif.render(findings, lines_of=lines_of, root=root)
        case "json":
            return json_list.render(findings)
        case "github":
            return github.render(findings)
        case _:
            raise UsageError(f"there is no format {format!r}", hint=f"there are {', '.join(FORMATS)}")
