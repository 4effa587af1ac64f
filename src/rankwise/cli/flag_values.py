"""What the flags of several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence


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
