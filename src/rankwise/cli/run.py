"""`rankwise run`: start a training script on many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError
from rankwise.launcher.agent import launch
from rankwise.launcher.checks import check_command
from rankwise.launcher.command import parse
from rankwise.launcher.console import Console

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Parse, check, launch; return the exit code."""
    spec, console = parse(argv), Console()
    for finding in check_command(spec, argv):
        if finding.severity == "error":
            raise UsageError(finding.what, hint=finding.fix)
        console.say(f"rankwise: {finding.severity}: {finding.what}\n  -> {finding.fix}")
    return launch(spec, console)
