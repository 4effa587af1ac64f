"""Runs one rule over a short text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from rankwise.lint import registry
from rankwise.lint.code_unit import CodeUnit
from rankwise.lint.program import Project
from rankwise.lint.simulated_run import study

if TYPE_CHECKING:
    from rankwise.lint.finding import Finding
    from rankwise.lint.rule import Rule
    from rankwise.lint.script import Script


def rule_of(rule_id: str) -> Rule[Any]:
    """The rule with an id."""
    return registry.rule(rule_id)


def script_of(code: str, **unit: Any) -> Script:
    """A text as rules see it."""
    return study(CodeUnit(path="train.py", language="python", code=textwrap.dedent(code), **unit), Project())


def found(rule_id: str, code: str, **unit: Any) -> list[Finding]:
    """What one rule finds in a text."""
    return list(rule_of(rule_id).check(script_of(code, **unit)))


def mended(rule_id: str, code: str) -> str:
    """The text with all edits of one rule made; each is on one line."""
    lines = textwrap.dedent(code).split("\n")
    edits = [edit for finding in found(rule_id, code) for edit in finding.edits]
    for edit in sorted(edits, key=lambda e: e.span, reverse=True):
        text = lines[edit.span.line - 1]
        lines[edit.span.line - 1] = text[: edit.span.col - 1] + edit.text + text[edit.span.end_col - 1 :]
    return "\n".join(lines)
