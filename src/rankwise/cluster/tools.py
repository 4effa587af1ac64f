"""The schedulers' own programs: run, and their errors passed on in their own words."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from rankwise.base.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_LINES = 12


def run_tool(
    argv: Sequence[str], *, doing: str, hint: str = "", stdin: str | None = None, timeout_s: float = 60.0
) -> str:
    """Run a program to its end, and return what it prints on standard output.

    Args:
        argv: Its words.
        doing: What for, as a clause that follows "can't": ``submit the job``.
        hint: What to do if it says no.
        stdin: What it reads; None: nothing.
        timeout_s: How long it may take.

    Raises:
        UsageError: There is no such program here.
        LaunchError: It has failed: by its own words.
    """
    try:
        done = subprocess.run(
            argv, input=stdin or "", capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except OSError as error:
        raise UsageError(
            f"can't {doing}: {argv[0]}: {error.strerror}",
            hint=f"run this where {argv[0]} is installed, or choose another cluster by --on",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"can't {doing}: {argv[0]} has not answered within {timeout_s:.0f} s") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        output = "\n  ".join(lines[-_MOST_LINES:]) or "it prints nothing"
        raise LaunchError(f"can't {doing}: {argv[0]} exits with {done.returncode}:\n  {output}", hint=hint or None)
    return done.stdout
