"""Messages to the user as log records: the logger ``rankwise`` and those below it, on standard error unless the user routes them elsewhere.

``logging.getLogger("rankwise").addHandler(...)`` before the first message takes them over; ``setLevel`` silences some.
"""

from __future__ import annotations

import logging
import sys
from typing import final

ROOT = "rankwise"


@final
class _StandardError(logging.Handler):
    """Writes to what is ``sys.stderr`` at that moment: a notebook or a test may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a line; its level is shown from warnings on."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        try:
            sys.stderr.write(f"rankwise: {level}{self.format(record)}\n")
        except (OSError, ValueError):  # closed, or its reader is gone
            self.handleError(record)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, which shows its messages even where nobody has configured logging.

    Args:
        name: The module's name: ``rankwise.runtime.stopping``.
    """
    root = logging.getLogger(ROOT)
    if not root.handlers:
        root.addHandler(_StandardError())
        root.propagate = False  # a handler of the root logger would show each message twice
        if root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
    return logging.getLogger(name)
