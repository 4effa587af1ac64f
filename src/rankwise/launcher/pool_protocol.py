"""What a program that calls ``launch`` and its pool say to each other: these objects, pickled, on a pipe for each way."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.base.os_calls import IS_WINDOWS

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from rankwise.base.errors import RankwiseError
    from rankwise.verdict.case import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What two calls must have in common for the same pool.

    Attributes:
        num_ranks: A number as text, or what to count.
        preload: What the user wants imported beside what the function needs.
        first_path: The folder in front of the caller's sys.path.
        flags: What the ranks' Python is started with, beside its name.
        outputs: Which files or terminals the ranks' output goes to; empty where it passes through the caller.
    """

    num_ranks: str
    cold: bool
    preload: tuple[str, ...]
    first_path: str
    python: str
    flags: tuple[str, ...]
    outputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first order: what all calls of a pool have in common.

    Attributes:
        imports: What the warm server imports.
        idle_s: Seconds without an order after which the pool ends.
    """

    kind: Kind
    imports: tuple[str, ...]
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The order to run a job. While it runs, a number is the signal to end it by; None says that the caller goes.

    Attributes:
        folder: Where the payload is, and where the ranks leave what comes of it; the caller removes it.
        variables: How the ranks' environment differs from the pool's.
    """

    folder: Path
    variables: dict[str, str | None]
    max_restarts: int


@dataclass(slots=True, kw_only=True)
class Answer:
    """How a job has ended; in its place comes the error for which there can be none.

    Attributes:
        verdict: None if nothing was started.
        reported: The facts beside the traceback, as text.
        restarts: How often all ranks were started again.
        is_late: Whether the caller had it stopped for its time.
    """

    num_ranks: int = 0
    verdict: Verdict | None = None
    reported: str = ""
    restarts: int = 0
    is_late: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether it ended for what happened to the launcher's own processes."""
        verdict = self.verdict
        return verdict is None or (verdict.kind != "ok" and not verdict.culprits and verdict.stopped_by is None)


if TYPE_CHECKING:
    Order = Opening | Call | int | None
    CallersEnd = Connection[Order, Answer | RankwiseError]
    PoolsEnd = Connection[Answer | RankwiseError, Order]


def lend(end: PoolsEnd) -> int:
    """Let a process that is started next have an end of a pipe; return the number by which it finds that."""
    if IS_WINDOWS:
        os.set_handle_inheritable(end.fileno(), True)  # type: ignore[attr-defined] # noqa: FBT003 - its only form
    return end.fileno()


def take_over(number: int, *, writable: bool) -> PoolsEnd:
    """Return an end of a pipe that the process which has started this one has lent; what is started here does not get it."""
    from multiprocessing import connection  # noqa: PLC0415 - only where it is needed

    if IS_WINDOWS:
        os.set_handle_inheritable(number, False)  # type: ignore[attr-defined] # noqa: FBT003 - its only form
        return connection.PipeConnection(number, readable=not writable, writable=writable)  # type: ignore[attr-defined,no-any-return]
    os.set_inheritable(number, False)  # noqa: FBT003 - its only form
    return connection.Connection(number, readable=not writable, writable=writable)
