"""A process that checks the script of a launch beside its start: few seconds of the CPU, errors only, no word if anything fails."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.base.errors import RankwiseError
from rankwise.lint.reporters.text import render
from rankwise.lint.running.files import Plan, check_files
from rankwise.lint.running.settings import load_settings, override
from rankwise.lint.running.shown_lines import lines_reader

if TYPE_CHECKING:
    from rankwise.lint.finding import Finding

#: Of the CPU, start included; a script that needs more is left to `rankwise check`.
BUDGET_S = 2.0
#: `rankwise check` tells them, a launch does not: errors of these rules were not all right in 150 widely read public
#: scripts, or are too new to have been seen there, or this run may well get by with them: the data is there already, no
#: two writes interleave, no second run uses the file.
NOT_AT_LAUNCH = frozenset({
    "RW104", "RW111", "RW112", "RW113", "RW201", "RW205", "RW209", "RW217", "RW302", "RW305", "RW405", "RW406", "RW516", "RW517",
    "RW206", "RW211", "RW515", "RW601", "RW818",
})  # fmt: skip


def main(path: str, *, color: bool, columns: int | None) -> int:
    """Print the errors in a script.

    Args:
        path: The script.
        color: Whether to use colours.
        columns: Of the terminal; None where there is none.

    Returns:
        How many there are, at most 100.
    """
    with contextlib.suppress(AttributeError, OSError):  # Windows has neither
        os.nice(10)  # the ranks' start comes first
        # What this signal does to a process that does not handle it: it ends, without a word.
        signal.setitimer(signal.ITIMER_PROF, BUDGET_S)
    findings = find_errors(path)
    sys.stdout.write(render(findings, lines_of=lines_reader(), color=color, width=columns, with_summary=False))
    return min(len(findings), 100)


def find_errors(path: str) -> tuple[Finding, ...]:
    """Find the errors in a script that a launch tells of, by its project's settings; nothing where these are wrong."""
    try:
        settings = override(load_settings(Path(path).parent), severity="error")
        found = check_files([path], settings, Plan(jobs=1)).findings
    except RankwiseError:
        return ()
    return tuple(one for one in found if one.severity == "error" and one.rule not in NOT_AT_LAUNCH)
