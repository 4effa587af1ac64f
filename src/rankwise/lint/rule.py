"""A rule: an id, how bad it is, and a pure function from the studied text to what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rankwise.lint.finding import Finding, Found, Span, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rankwise.base.findings import Severity
    from rankwise.lint.code_unit import Language

Studied = TypeVar("Studied")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[Studied]):
    """One kind of mistake.

    Attributes:
        id: ``RW101``; the hundreds are its chapter. Its page is docs/rules/check/RW101.md.
        name: Words for it, ``collective-under-rank-test``.
        severity: Of its findings, where a finding does not say otherwise.
        classes: Failure classes it finds (docs/reference/failure-classes.md).
        summary: One line for lists: what is wrong, not what to do.
        looks_at: Which studied text ``look`` takes: a ``Script`` (Python) or ``Shell`` commands.
        look: Pure function from the studied text to what it found.
        needs_ranks: Whether it has something to say only of texts that have to do with several processes.
        fixable: Whether some of its findings carry edits for ``--fix``.
    """

    id: str
    name: str
    severity: Severity
    classes: tuple[str, ...]
    summary: str
    look: Callable[[Studied], Iterable[Found]]
    looks_at: Language = "python"
    needs_ranks: bool = True
    fixable: bool = False

    def check(self, studied: Any) -> Iterator[Finding]:
        """Look at a text; class and severity are the rule's (first) where what it found has none of its own."""
        seen = set()
        for one in self.look(studied):
            span = one.at if isinstance(one.at, Span) else span_of(one.at, studied.unit.lines)
            if (span, one.fix) in seen:
                continue  # a command that a loop runs several times
            seen.add((span, one.fix))
            yield Finding(
                rule=self.id,
                failure_class=next(iter(self.classes), "") if one.failure_class is None else one.failure_class,
                severity=one.severity or self.severity,
                message=one.message,
                fix=one.fix,
                path=studied.unit.path,
                span=span,
                also=tuple(one.also),
                edits=tuple(one.edits),
            )


def rule(
    id_: str,
    severity: Severity,
    classes: str,
    summary: str,
    *,
    looks_at: Language = "python",
    needs_ranks: bool = True,
    fixable: bool = False,
) -> Callable[[Callable[[Studied], Iterable[Found]]], Rule[Studied]]:
    """Make a rule of the function below; its name is the function's, ``classes`` has blanks between them."""

    def make(look: Callable[[Studied], Iterable[Found]]) -> Rule[Studied]:
        name = look.__name__.replace("_", "-")
        return Rule(
            id=id_,
            name=name,
            severity=severity,
            classes=tuple(classes.split()),
            summary=summary,
            look=look,
            looks_at=looks_at,
            needs_ranks=needs_ranks,
            fixable=fixable,
        )

    return make
