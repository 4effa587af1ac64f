"""The parser of a command's flags, and the words that several flags of it take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

from rankwise.base.errors import UsageError
from rankwise.base.help_format import HelpFormatter, reword

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class Parser(argparse.ArgumentParser):
    """argparse that raises our error instead of ending the process."""

    def __init__(self, prog: str, **settings: Any) -> None:
        """Make a parser, with argparse's own settings."""
        super().__init__(prog, formatter_class=HelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError."""
        raise UsageError(reword(message), hint=f"see `{self.prog} --help`")


@final
class Given(argparse.Action):
    """Stores a value, and refuses an empty one: most often it is a job script's variable that nobody has set."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Path | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        """Store it, or refuse it."""
        if not values or (isinstance(values, str) and not values.strip()):
            flag, noun = option_string or self.dest, {"only": "probe", "hosts": "host"}.get(self.dest)
            parser.error(
                f"{flag} names no {noun}: is a variable of the job script empty?"
                if noun
                else f"an empty value (is a variable of the job script not set?): {flag}"
            )
        setattr(namespace, self.dest, values)


def read_path(text: str) -> Path | None:
    """Read a path; None for an empty word, which `Path` takes for the current folder."""
    return Path(text) if text.strip() else None
