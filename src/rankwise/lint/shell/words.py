"""Words of a command: what is typed, what the shell makes of it, and which part only the run can know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.lint.finding import Span


@dataclass(frozen=True, slots=True)
class Hole:
    """A part of a word that only the run knows.

    Attributes:
        names: Variables that it depends on, as far as they are seen; ``RANDOM`` also for other dice (``shuf``).
    """

    names: tuple[str, ...] = ()


Part = str | Hole


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of a command, after expansion.

    Attributes:
        raw: As it is typed; for a word that came out of a variable, the reference to it.
        parts: Its value: known text and holes.
        span: Where it is typed.
        is_open: Whether it may turn into no word or into several: an unknown, unquoted expansion, or ``"$@"``.
        is_typed: Whether ``span`` holds this very word, so that an edit there changes it.
    """

    raw: str
    parts: tuple[Part, ...]
    span: Span
    is_open: bool = False
    is_typed: bool = True

    @property
    def text(self) -> str | None:
        """The whole value, if it is known."""
        if len(self.parts) == 1 and isinstance(self.parts[0], str):
            return self.parts[0]
        return None if self.parts else ""

    @property
    def head(self) -> str:
        """The known beginning of the value."""
        return self.parts[0] if self.parts and isinstance(self.parts[0], str) else ""

    @property
    def names(self) -> tuple[str, ...]:
        """Variables that its unknown parts depend on."""
        return tuple(name for part in self.parts if isinstance(part, Hole) for name in part.names)

    @property
    def is_random(self) -> bool:
        """Whether a dice is thrown for it."""
        return "RANDOM" in self.names


def joined(parts: list[Part]) -> tuple[Part, ...]:
    """The same value with neighbouring texts in one."""
    result: list[Part] = []
    for part in parts:
        if isinstance(part, str) and result and isinstance(last := result[-1], str):
            result[-1] = last + part
        elif part != "":
            result.append(part)
    return tuple(result)


def value_after_equals(word: Word) -> Word | None:
    """The value in ``--flag=value``, or None where no ``=`` is in the known beginning."""
    _, equals, rest = word.head.partition("=")
    if not equals:
        return None
    return Word(
        raw=word.raw.partition("=")[2] if "=" in word.raw else word.raw,
        parts=joined([rest, *word.parts[1:]]),
        span=word.span,
        is_typed=False,
    )
