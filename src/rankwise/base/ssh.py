"""ssh to the hosts of a job: without questions and long waits, and what its failures mean."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: No question that nobody answers, and no wait of minutes for a host that is down; what the user gives stands before
#: these and wins.
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-T")
#: ssh's own exit code, where it did not reach the host or was not let in.
SSH_FAILED = 255
#: So long a host may take to let us in and start a Python; from a busy network disk that takes a while.
SSH_TRY_S = 30.0


def read_ssh(text: str, flag: str = "--ssh") -> list[str]:
    """Return the words of an ssh command with its own options: ``ssh -p 2222``.

    Raises:
        UsageError: It can't be read.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r} can't be read: {error}", hint="quote it as a shell does") from error
    if not words:
        raise UsageError(f"{flag} is empty", hint=f"{flag} 'ssh -p 2222'")
    return words


def write_ssh(ssh: Sequence[str], host: str) -> list[str]:
    """Return the words that have a shell on a host read the line behind them."""
    return [*ssh, *_OPTIONS, host]


def write_ssh_test(ssh: Sequence[str], host: str) -> str:
    """Return the command by which a user sees whether a host can be reached."""
    return f"{shlex.join([*ssh, '-o', 'BatchMode=yes', host, 'true'])}  # must work without a prompt"


def find_ssh_failure(host: str, lines: Sequence[str]) -> str:
    """Return what has happened where ssh has ended by `SSH_FAILED`.

    Args:
        host: As ssh knows it.
        lines: What it has printed on standard error.
    """
    return f"ssh does not reach {host}: {lines[-1] if lines else 'it prints nothing'}"
