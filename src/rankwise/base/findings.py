"""What the launcher's checks of a command find, and the severities that they share with the rules of the static check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "hint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong or could be better.

    Attributes:
        id: The failure class it belongs to (docs/reference/failure-classes.md), or an empty string.
        severity: ``error`` breaks, hangs or is silently wrong; ``warning`` does so in some settings.
        what: What was found, with the values.
        fix: What to do, as one line.
        where: ``file.py:LINE``, if it has a place.
    """

    id: str
    severity: Severity
    what: str
    fix: str = ""
    where: str | None = None
