"""The parser of all commands: errors are ours, in plain words, and guess what was meant; a flag is never broken at its hyphens, and spelled once."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from typing import TYPE_CHECKING, NoReturn, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_KINDS = {"int": "a whole number", "float": "a number"}
_VALUE = re.compile(r"argument (?P<flag>[^\s:/]+)[^\s:]*: (?P<rest>.*)", re.DOTALL)
_KIND = re.compile(r"invalid (?P<kind>int|float) value: (?P<given>.*)")
_CHOICE = re.compile(r"invalid choice: (?P<given>.*) \(choose from (?P<choices>.*)\)")
_AMBIGUOUS = re.compile(r"ambiguous option: (\S+) could match (.*)")
_UNKNOWN = re.compile(r"(?:unrecognized arguments|no such option): (--?[^\s=]+)")


def reword(message: str) -> str:
    """Return argparse's error in plain words: ``--max-restarts 'x' is not a whole number``.

    Args:
        message: As it is given to ``ArgumentParser.error``.
    """
    value = _VALUE.fullmatch(message)
    if value is None:
        return message
    flag, rest = value["flag"], value["rest"]
    # Where argparse has no name for an argument, it takes ours of the attribute.
    flag = "" if flag[0].islower() else f"{flag} "
    if kind := _KIND.fullmatch(rest):
        return f"{flag}{kind['given']} is not {_KINDS[kind['kind']]}"
    if choice := _CHOICE.fullmatch(rest):
        return f"{flag}{choice['given']} is none of {choice['choices'].replace(chr(39), '')}"
    return f"{flag}{rest}" if rest.startswith("'") else f"{flag.strip()}: {rest}"


@final
class HelpFormatter(argparse.HelpFormatter):
    """argparse's, for flags that torchrun spells with hyphens and with underscores."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        given = action.option_strings
        action.option_strings = [one for one in given if "_" not in one or one.replace("_", "-") not in given]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = given


@final
class Parser(argparse.ArgumentParser):
    """argparse that raises our error instead of ending the process, and guesses what was meant.

    Args:
        prog: The command.
        aliases: What others call a flag, without hyphens, and the flag.
        unabbreviated: Flags that must be written out.
        missing: For an argument that must be given: what to say where it is not, and what to do.
        usage: As argparse's, and so are the others.
        description: What it does.
        epilog: What stands below the flags.
        allow_abbrev: Whether the beginning of a flag will do.
    """

    def __init__(
        self,
        prog: str,
        *,
        aliases: Mapping[str, str] | None = None,
        unabbreviated: Collection[str] = (),
        missing: Mapping[str, tuple[str, str]] | None = None,
        usage: str | None = None,
        description: str | None = None,
        epilog: str | None = None,
        allow_abbrev: bool = True,
    ) -> None:
        super().__init__(prog, usage, description, epilog, formatter_class=HelpFormatter, allow_abbrev=allow_abbrev)
        self._aliases, self._unabbreviated, self._missing = aliases or {}, unabbreviated, missing or {}

    def _get_option_tuples(self, option_string: str) -> list[tuple[argparse.Action, str, str | None]]:
        """Leave some out of what may be abbreviated.

        argparse tries abbreviations on every word, also on those behind a script: the script's ``--re`` must
        not become ambiguous because we have a ``--report``.
        """
        return [found for found in super()._get_option_tuples(option_string) if found[1] not in self._unabbreviated]

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError."""
        hint = f"see `{self.prog} --help`"
        # Both spellings of one flag are no ambiguity to whoever types it.
        if several := _AMBIGUOUS.fullmatch(message):
            meant = list(dict.fromkeys(flag.replace("_", "-") for flag in several[2].split(", ")))
            kind = "ambiguous option" if meant[1:] else "unrecognized arguments"
            message, hint = f"{kind}: {several[1]}", f"did you mean {' or '.join(meant)}?"
        if unknown := _UNKNOWN.search(message):
            hint = self._guess(unknown[1].replace("_", "-")) or hint
        for argument, (problem, what_to_do) in self._missing.items():
            if f"required: {argument}" in message:
                message, hint = problem, what_to_do
        raise UsageError(reword(message), hint=hint)

    def _guess(self, wrong: str) -> str | None:
        flag = self._aliases.get(wrong.lstrip("-"))
        if flag is None:
            flag = next(iter(difflib.get_close_matches(wrong, self._list_flags(), n=1, cutoff=0.6)), None)
        return flag and f"did you mean {flag}?"

    def _list_flags(self) -> list[str]:
        """List its flags and those of its commands: an error about one of theirs is raised here."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                flags += [flag for command in action.choices.values() for flag in command._list_flags()]
        return flags
