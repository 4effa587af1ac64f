"""A JSON list with an object for each finding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.lint.finding import Finding, Span


def render(findings: Sequence[Finding]) -> str:
    """Return the list; an empty one if nothing was found."""
    return json.dumps([to_json(one) for one in findings], indent=1) + "\n"


def to_json(one: Finding) -> dict[str, object]:
    """Return a finding as an object: lines and columns from 1, in characters, the end column is the first one behind."""
    return {
        "path": one.path,
        **_numbers(one.span),
        "rule": one.rule,
        "class": one.failure_class,
        "severity": one.severity,
        "message": one.message,
        "fix": one.fix,
        "cell": one.cell,
        "fixable": bool(one.edits),
        "also": [{"message": word, "path": path, **_numbers(span)} for word, path, span in one.also],
    }


def _numbers(span: Span) -> dict[str, object]:
    return {"line": span.line, "col": span.col, "end_line": span.end_line, "end_col": span.end_col}
