"""GitHub's workflow commands: each finding becomes a note beside the line of the pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.registry import all_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.finding import Finding

_LEVELS = {"error": "error", "warning": "warning", "hint": "notice"}


def render(findings: Sequence[Finding]) -> str:
    """Return a command for each finding; nothing if there is none."""
    names = {rule.id: rule.name for rule in all_rules()}
    return "".join(f"{_command(one, names.get(one.rule, ''))}\n" for one in findings)


def _command(one: Finding, name: str) -> str:
    span, message = one.span, one.message
    properties: dict[str, object] = {"file": one.path.replace("\\", "/")}
    if one.cell is not None:
        # A line of a cell is no line of the file, and a note at a wrong line is worse than one at the file.
        message = f"cell {one.cell}, line {span.line}: {message}"
    else:
        properties |= {"line": span.line, "endLine": span.end_line}
        if span.line == span.end_line:  # GitHub reads columns only then
            properties |= {"col": span.col, "endColumn": max(span.end_col, span.col + 1)}
    properties["title"] = f"{one.rule} {name}".strip() + (f" ({one.failure_class})" if one.failure_class else "")
    listed = ",".join(f"{key}={escape_property(str(value))}" for key, value in properties.items())
    advice = f"\n-> {one.fix}" if one.fix else ""
    return f"::{_LEVELS[one.severity]} {listed}::{escape_message(message + advice)}"


def escape_message(text: str) -> str:
    """Return a text as the message of a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """Return a text as the value of a command's property."""
    return escape_message(text).replace(":", "%3A").replace(",", "%2C")
