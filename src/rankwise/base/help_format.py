"""How help texts are laid out: a flag is never broken at its hyphens, and spelled once."""

from __future__ import annotations

import argparse
import textwrap
from typing import final


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
