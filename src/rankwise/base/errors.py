"""What can go wrong, as types: each error says what happened, on which rank, and what to do.

RankwiseError
├── UsageError        the command or the call is wrong: nothing was started
├── LaunchError       the job could not be started or kept alive
├── RankFailedError   a function that was launched on several ranks failed on one of them
├── RendezvousError   the nodes or ranks of a job did not find each other
│   └── HandshakeError   they met, and disagree about who they are
├── CollectiveError   the ranks did not call the same thing
│   └── CollectiveTimeoutError   some of them did not call at all
├── ModelError        a model can't be spread over the ranks as it is
├── DataError         the data can't be dealt out to the ranks, or a sample can't be had
├── CheckpointError   a checkpoint can't be written, found or read
└── NumericsError     a loss or a gradient is NaN or infinite
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
    """The command or the call is wrong; nothing was started."""

    exit_code = 2


class LaunchError(RankwiseError):
    """The job could not be started, or the processes that run it died."""


class RankFailedError(RankwiseError):
    """A function that was launched on several ranks failed on one of them; its traceback is in the message."""


class RendezvousError(RankwiseError):
    """The nodes or ranks of a job did not find each other."""


class HandshakeError(RendezvousError):
    """The ranks joined, but disagree about who they are: absent, duplicate, or of different worlds, versions, scripts."""


class CollectiveError(RankwiseError):
    """The ranks did not call the same collective with matching arguments, or one was called in a way that can't work."""


class CollectiveTimeoutError(CollectiveError):
    """Some ranks did not enter a collective in time."""


class ModelError(RankwiseError):
    """A model can't be spread over the ranks as it is: it differs between them, or can't be trained there."""


class DataError(RankwiseError):
    """The data can't be split over the ranks as requested, or a sample or batch is missing."""


class CheckpointError(RankwiseError):
    """A checkpoint can't be written, found or read; names the file and the cause."""


class NumericsError(RankwiseError):
    """A loss or a gradient is NaN or infinite; names the first step and the ranks."""


# Shown as users import them: rankwise.HandshakeError.
for _error in (
    RankwiseError,
    UsageError,
    LaunchError,
    RankFailedError,
    RendezvousError,
    HandshakeError,
    CollectiveError,
    CollectiveTimeoutError,
    ModelError,
    DataError,
    CheckpointError,
    NumericsError,
):
    _error.__module__ = "rankwise"
