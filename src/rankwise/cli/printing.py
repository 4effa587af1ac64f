"""Puts a report on standard output: whole, whatever the console's alphabet is and whoever reads it."""

from __future__ import annotations

import os
import sys

from rankwise.base.errors import LaunchError


def put(text: str) -> bool:
    """Print a text.

    A console of another alphabet must not hide what was found, and `| head`, which closes early, is no error.

    Args:
        text: Lines; a break at the end is not added.

    Returns:
        Whether anybody still reads it.

    Raises:
        LaunchError: It can't be written: the disk is full, or standard output is closed.
    """
    try:
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:  # a test's, or a notebook's
            sys.stdout.write(text)
        else:
            sys.stdout.flush()
            stream.write(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
        return False
    except (OSError, ValueError, AttributeError) as error:
        _forget_output()
        raise LaunchError(
            f"the report can't be written to standard output: {error}",
            hint="write it to a file with space: > report.txt",
        ) from error
    return True


def _forget_output() -> None:
    """Let nothing fail once more when the interpreter flushes at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = None
