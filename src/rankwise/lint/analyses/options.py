"""Command-line options that a script declares with argparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.lint.interpreter.training import option_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.lint.interpreter.values import Call, Value
    from rankwise.lint.script import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One `add_argument`.

    Attributes:
        call: The call.
        flags: As written, ``--local_rank``.
        dest: The name of its value.
    """

    call: Call
    flags: tuple[str, ...]
    dest: str

    @property
    def default(self) -> Value | None:
        """Its default, if one is given."""
        return self.call.arg(None, "default")

    @property
    def is_required(self) -> bool:
        """Whether the program ends without it."""
        return "required" in self.call.kwargs and self.call.kwargs["required"].const is True


def options(script: Script) -> Iterator[Option]:
    """Options that the script, or a module of the project's, declares."""
    for call in script.all_calls:
        if call.name.endswith(".add_argument") and (dest := option_name(call)):
            yield Option(call=call, flags=tuple(str(one.const) for one in call.args), dest=dest)


def option_of(value: Value | None) -> Call | None:
    """The `add_argument` whose option a value is."""
    made = value.made if value is not None else None
    return made if made is not None and made.name.endswith(".add_argument") else None


def text_given(value: Value | None) -> tuple[str | None, bool]:
    """The text that a value is, and whether it is only an option's default."""
    option = option_of(value)
    text = option.arg(None, "default") if option is not None else value
    is_text = text is not None and isinstance(text.const, str)
    return (text.const, option is not None) if is_text else (None, False)  # type: ignore[union-attr]
