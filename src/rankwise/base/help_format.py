"""How help texts and errors of flags are worded: a flag is never broken at its hyphens, and spelled once."""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import final

_KINDS = {"int": "a whole number", "float": "a number"}
_VALUE = re.compile(r"argument (?P<flag>[^\s:/]+)[^\s:]*: (?P<rest>.*)", re.DOTALL)
_KIND = re.compile(r"invalid (?P<kind>int|float) value: (?P<given>.*)")
_CHOICE = re.compile(r"invalid choice: (?P<given>.*) \(choose from (?P<choices>.*)\)")


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
