"""Messages to the user as log records: the logger ``rankwise`` and those below it, on standard error unless the user routes them elsewhere.

``logging.getLogger("rankwise").addHandler(...)`` takes them over; ``setLevel`` silences some. Handlers of the root logger do not see them.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import final

ROOT = "rankwise"


@final
class _StandardError(logging.Handler):
    """Writes to what is ``sys.stderr`` at that moment: a notebook or a test may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a line, unless the user has a handler; its level is shown from warnings on."""
        if len(logging.getLogger(ROOT).handlers) > 1:
            return
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        with suppress(OSError, ValueError, AttributeError):  # closed, or none, or its reader is gone
            sys.stderr.write(f"rankwise: {level}{self.format(record)}\n")


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
