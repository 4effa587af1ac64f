"""What can go wrong, as types: each error says what happened, on which rank, and what to do.

RankwiseError
├── UsageError        the command or the call is wrong: nothing was started
├── LaunchError       the job could not be started or kept alive
└── RendezvousError   the nodes of a job did not find each other
"""

from __future__ import annotations


class RankwiseError(Exception):
    """Base of all errors of this project.

    Args:
        message: What happened, with the values that disagree.
        rank: The global rank concerned, if one is.
        hint: What to do about it, as one line.
    """

    #: What the command exits with when this error ends it.
    exit_code = 1

    def __init__(self, message: str, *, rank: int | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.hint = hint

    def __str__(self) -> str:
        where = "" if self.rank is None else f"[rank {self.rank}] "
        return f"{where}{self.message}" + (f"\n  -> {self.hint}" if self.hint else "")


class UsageError(RankwiseError):
    """The command is wrong; nothing was started."""

    exit_code = 2


class LaunchError(RankwiseError):
    """The job could not be started, or the processes that keep it died."""


class RendezvousError(RankwiseError):
    """The nodes of a job did not find each other."""
