"""A rule: an id, how bad it is, and a pure function from the studied text to what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.base.findings import Severity
    from rankwise.lint.finding import Finding

Looks = Literal["python", "shell"]
Studied = TypeVar("Studied")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[Studied]):
    """One kind of mistake.

    Attributes:
        id: ``RW101``; the hundreds are its chapter (docs/rules).
        name: Words for it, ``collective-under-rank-test``.
        severity: Of its findings, where a finding does not say otherwise.
        classes: Failure classes it finds (docs/reference/failure-classes.md).
        summary: One line for lists: what is wrong, not what to do.
        looks_at: Which studied text ``check`` takes: a ``Script`` (Python) or ``Shell`` commands.
        check: Pure function from the studied text to findings.
        needs_ranks: Whether it has something to say only of texts that have to do with several processes.
        fixable: Whether some of its findings carry edits for ``--fix``.
    """

    id: str
    name: str
    severity: Severity
    classes: tuple[str, ...]
    summary: str
    check: Callable[[Studied], Iterable[Finding]]
    looks_at: Looks = "python"
    needs_ranks: bool = True
    fixable: bool = False
