"""One line for each finding, as editors and `grep` like it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.reporters.text_form import head, paint, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.finding import Finding


def render(findings: Sequence[Finding], *, color: bool = False) -> str:
    """Return a line for each finding, and the line of counts."""
    lines = [head(one, color=color) for one in findings]
    return "\n".join([*lines, paint(summary(findings), "bold", color=color)]) + "\n"
