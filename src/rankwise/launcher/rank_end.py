"""A rank while it lives, and what is known of it when it has ended."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from rankwise.base.faults import read_fault
from rankwise.base.files import read_all
from rankwise.base.os_calls import KILL_SIGNAL
from rankwise.base.requeue import has_left
from rankwise.base.terminal import strip_escapes
from rankwise.evidence.reader.notes import parse_stack, parse_traceback, read_notes, split_crash
from rankwise.launcher.printed_fault import find_printed_fault
from rankwise.verdict.case import RankEnd

if TYPE_CHECKING:
    from rankwise.base.faults import FaultRecord
    from rankwise.evidence.reader.notes import Ending, Notes, Stack
    from rankwise.evidence.reader.rank_channel import RankChannel
    from rankwise.launcher.output import RankStreams

#: A text that is shorter stands anywhere.
_LEAST_TEXT = 6


@final
@dataclass(slots=True, kw_only=True)
class Rank:
    """A rank while it lives."""

    rank: int
    local_rank: int
    tag: str
    streams: RankStreams
    notes_fd: int
    stacks_fd: int
    evidence: RankChannel | None = None
    pid: int = 0
    code: int | None = None
    ended_s: float = 0.0
    stopped_s: float | None = None
    was_noticed: bool = False
    was_killed: bool = False
    over_s: float | None = None
    stack: Stack | None = None
    refusal: str = ""
    started_s: float = 0.0
    incarnation: int = 0
    former_code: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self.code is None

    def begin_again(self, notes_fd: int, stacks_fd: int, evidence: RankChannel | None) -> None:
        """Become a rank that has not been started, with other files; its streams go on."""
        self.close()
        self.streams.begin_again()
        self.notes_fd, self.stacks_fd, self.evidence = notes_fd, stacks_fd, evidence
        self.incarnation += 1
        self.former_code = self.code or 0
        self.was_noticed = self.was_killed = False
        self.tag = f"{self.tag.partition('+')[0]}+{self.incarnation}"
        self.pid, self.code, self.stack, self.over_s, self.stopped_s, self.refusal = (
            0,
            None,
            None,
            None,
            None,
            "",
        )

    def close(self) -> None:
        """Let go of what it has written for us."""
        os.close(self.notes_fd)
        os.close(self.stacks_fd)
        if self.evidence is not None:
            self.evidence.close()

    def note_end(self, code: int, at_s: float, refusal: str = "") -> None:
        """Note how and when it ended; one that was told to stop when it had ended already has ended by itself."""
        self.code, self.ended_s, self.refusal = code, at_s, refusal
        if self.stopped_s is not None and at_s < self.stopped_s:
            self.stopped_s = None


#: Python's own when it could not flush standard output, which it tries at the very end.
_FLUSH_FAILED = 120


def find_ending(rank: Rank) -> Ending | None:
    """Return where a rank's own words end; None if what it printed at its very end may tell why it ended so."""
    if rank.code is None or rank.code < 0 or rank.code == _FLUSH_FAILED:
        return None
    return read_notes(read_all(rank.notes_fd)).find_ending(rank.pid)


def describe_end(
    rank: Rank, *, last_words: str, stopped_s: float | None, asks_requeue: bool, expired: str = ""
) -> RankEnd:
    """Bring together what a rank has left: notes, error file, stacks, the end of its standard error.

    Args:
        rank: One that has ended.
        last_words: The end of its standard error.
        stopped_s: When we ended it; None if it was not us.
        asks_requeue: Whether it wants to be started again.
        expired: The timer of its own for which torch's watchdog has killed it.
    """
    text = read_all(rank.notes_fd)
    notes = read_notes(text)
    fault = notes.fault
    if rank.code == 0:
        fault = None  # printed, and survived: by a library that goes on after an error
    elif fault is None and rank.code:
        fault = _read_error_file(rank) or _find_shown_fault(notes, rank.code, last_words)
    is_over = rank.over_s is not None and not has_left(text)
    if fault is None and is_over and rank.code in {-KILL_SIGNAL, -signal.SIGTERM}:
        fault = find_printed_fault(last_words, rank.over_s or 0.0)
    # A script that switched faulthandler on itself has its stack on standard error.
    crashes = (split_crash(text)[1] for text in (read_all(rank.stacks_fd), last_words))
    crash = next((stack for text in crashes if (stack := parse_stack(text))), None)
    if crash is None and fault is None and rank.code:
        # A traceback that the script printed itself before it left by sys.exit or os._exit.
        crash = parse_traceback("\n".join(last_words.splitlines()[-40:]))
    log = rank.streams.log
    return RankEnd(
        rank=rank.rank,
        local_rank=rank.local_rank,
        pid=rank.pid,
        code=rank.code,
        ended_s=rank.ended_s,
        stopped_s=stopped_s,
        was_noticed=rank.was_noticed,
        asks_requeue=asks_requeue,
        fault=fault,
        finished_s=notes.finished_s,
        crash=crash,
        left_at=notes.left_at if (rank.code or 0) >= 0 else None,
        stack=rank.stack,
        problem=notes.problem,
        expired=expired,
        last_words=last_words,
        log=str(log) if log.exists() else None,
    )


def _find_shown_fault(notes: Notes, code: int, last_words: str) -> FaultRecord | None:
    """Return the exception for which the script has left by sys.exit, if it has printed what that says: as it likes, with advice behind it.

    Its traceback stays as it was printed, or was not.
    """
    if notes.handled is None or notes.left is not None:
        return None
    fault, asked = notes.handled
    text = fault.message.partition(": ")[2].split("\n")[0].strip()
    # A script may have caught that exit, and left by another one.
    is_shown = len(text) >= _LEAST_TEXT and text in strip_escapes(last_words)
    return replace(fault, callstack="") if is_shown and asked == code else None


def _read_error_file(rank: Rank) -> FaultRecord | None:
    """Return what the script's own ``@record``, or another writer of error files, has left."""
    fault = read_fault(rank.streams.error_file)
    stack = parse_traceback(fault.callstack) if fault else None
    return replace(fault, where=stack.where) if fault and stack else fault
