"""Takes scenes: what each rank of this node does at one moment, by its own records, its stack and the kernel's word."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.base.files import read_all
from rankwise.evidence.reader.kernel_wait import find_wait
from rankwise.evidence.reader.notes import Notes, Stack, read_notes
from rankwise.evidence.reader.process_state import (
    IDLE_SHARE,
    has_busy_threads,
    read_process,
    reads_terminal,
    takes_signals,
    ticks_per_second,
)
from rankwise.evidence.reader.rank_activity import RankActivity
from rankwise.evidence.reader.scene import FRESH_S, Child, RankFacts, Scene
from rankwise.evidence.reader.snapshot import take_stacks
from rankwise.evidence.reader.thread_choice import choose_stack
from rankwise.launcher.process_watch import ProcessWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.base.clock import Clock
    from rankwise.evidence.reader.process_state import ProcessFacts
    from rankwise.evidence.reader.scene import Evidence
    from rankwise.launcher.rank_end import Rank

#: Over so long the share of a core is measured, and over so long at least whether a rank is at work.
_SHARE_S, _BUSY_S = 2.0, 0.9
#: An answer comes within milliseconds, unless the interpreter's lock is held by C code, or an import keeps it busy.
_ANSWER_S = 2.0
_SIGNAL_S = 0.2
#: So long one look may read records: whoever looks also has to hear of signals, and of ranks that end.
_READING_S = 0.1
#: And so long at a job's end, when nobody is left to hear of.
_LAST_READING_S = 1.0
#: Frames that only a debugger has.
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/IPython/terminal/debugger", "/remote_pdb")


@dataclass(slots=True, kw_only=True)
class _SampledRank:
    """What has been seen of one rank."""

    rank: Rank
    moved_s: float
    evidence: Evidence | None = None
    mark: bytes = b""
    read_s: float = float("-inf")
    is_up_to_date: bool = True
    progress: object = None
    process: ProcessFacts | None = None
    used: deque[tuple[float, int]] = field(default_factory=deque)
    busy_s: float = 0.0
    asked_s: float = float("-inf")
    signalled_s: float = float("-inf")
    left_alone_s: float = float("-inf")
    signalled: Stack | None = None
    has_answered: bool = False
    is_last_read: bool = False
    notes_size: int = -1
    notes: Notes = field(default_factory=Notes)

    @property
    def is_awaited(self) -> bool:
        """Whether it was asked, or has ended, since it was read last."""
        return self.asked_s >= self.read_s > float("-inf") or not self.rank.is_alive

    @property
    def share(self) -> float | None:
        """CPU time over time, of the last seconds."""
        if len(self.used) < 2 or self.used[-1][0] <= self.used[0][0]:
            return None
        (first_s, first), (last_s, last) = self.used[0], self.used[-1]
        return (last - first) / ticks_per_second() / (last_s - first_s)

    @property
    def newest_stack(self) -> tuple[Stack | None, float]:
        """The stack that counts, by whichever way it was told last, and when that was."""
        if (
            self.evidence is not None
            and self.evidence.stacks_s is not None
            and self.evidence.stacks_s > self.signalled_s
        ):
            return choose_stack(self.evidence), self.evidence.stacks_s
        return self.signalled, self.signalled_s

    def find_stack(self, now: float) -> Stack | None:
        """Return the stack that it has now; None if what was told may be out of date."""
        stack, reported_s = self.newest_stack
        has_stood = max(self.moved_s, self.busy_s) <= reported_s
        return stack if self.rank.is_alive and (has_stood or now - reported_s <= FRESH_S) else None


@final
class RankSampler:
    """Looks at the ranks of one attempt.

    Args:
        ranks: All of this node.
        world_size: Of the job.
        clock: Where the time comes from.
    """

    def __init__(self, ranks: Sequence[Rank], world_size: int, clock: Clock, *, has_agent_store: bool = True) -> None:
        self._clock, self._world_size, self._has_agent_store = clock, world_size, has_agent_store
        self._processes, now = ProcessWatch(), clock.monotonic()
        self._tracks = {rank.rank: _SampledRank(rank=rank, moved_s=now) for rank in ranks}

    def renew(self, rank: Rank) -> None:
        """Forget what was seen of a rank that is started again alone."""
        self._tracks[rank.rank] = _SampledRank(rank=rank, moved_s=self._clock.monotonic())

    # ---------------------------------------------------------------- looking

    def look(self, budget_s: float = _READING_S) -> bool:
        """See what has moved, at the cost of some microseconds for each rank that has not.

        Args:
            budget_s: For so long records are read, some milliseconds for each rank that has new ones; with many ranks
                the others' turn comes at the next looks.

        Returns:
            Whether anything is new: a record, an answer, a rank's end.
        """
        now, news = self._clock.monotonic(), False
        # Those that were asked or have ended come first, then who was not read for longest.
        for track in sorted(self._tracks.values(), key=lambda one: (not one.is_awaited, one.read_s)):
            news |= self._look_at(track, now, may_read=self._clock.monotonic() - now <= budget_s)
        return news

    def forgive(self) -> None:
        """Count all waiting from now on: this process, or a rank, was stopped meanwhile, and nobody could move."""
        now = self._clock.monotonic()
        for track in self._tracks.values():
            track.moved_s, track.busy_s = max(track.moved_s, now), now
            track.used.clear()

    def _look_at(self, track: _SampledRank, now: float, *, may_read: bool) -> bool:
        rank = track.rank
        if not rank.pid or track.is_last_read:
            return False
        news = self._look_at_evidence(track, now, may_read=may_read)
        if rank.is_alive:
            self._look_at_process(track, now)
        elif track.is_up_to_date:
            track.is_last_read = news = True  # what it wrote last is read once, after its end
        self._look_at_notes(track)
        return news

    def _look_at_evidence(self, track: _SampledRank, now: float, *, may_read: bool) -> bool:
        place = track.rank.evidence
        track.is_up_to_date = True
        if place is None:
            return False
        # Asked in this order: what has been answered by now is in what is read then.
        has_answered, mark = place.is_answered and self._answers(track), place.mark
        if mark == track.mark:
            track.has_answered = has_answered
            return False
        if not may_read:
            track.is_up_to_date = False
            if not track.is_awaited:  # else what is new may be no more than the answer
                track.moved_s = now
            return False
        evidence = place.read()
        track.mark, track.read_s, track.has_answered, track.evidence = mark, now, has_answered, evidence
        if (progress := _progress(evidence)) != track.progress:
            track.progress, track.moved_s = progress, now
        return True

    def _look_at_process(self, track: _SampledRank, now: float) -> None:
        was_stopped = track.process is not None and track.process.state == "stopped"
        track.process = process = read_process(track.rank.pid)
        if process is None:
            return
        if was_stopped and process.state != "stopped":
            self.forgive()
        track.used.append((now, process.ticks))
        while len(track.used) > 2 and now - track.used[1][0] >= _SHARE_S:
            track.used.popleft()
        before_s, before = next((one for one in reversed(track.used) if now - one[0] >= _BUSY_S), track.used[0])
        if process.ticks - before > IDLE_SHARE * ticks_per_second() * max(now - before_s, _BUSY_S):
            track.busy_s = now

    @staticmethod
    def _look_at_notes(track: _SampledRank) -> None:
        size = os.fstat(track.rank.notes_fd).st_size
        if size != track.notes_size:
            track.notes_size = size
            track.notes = read_notes(read_all(track.rank.notes_fd))

    # ----------------------------------------------------------------- asking

    def activities(self) -> list[RankActivity]:
        """Return how each rank that has been started, and has not ended, seemed at the last look."""
        now = self._clock.monotonic()
        return [
            RankActivity(
                rank=number,
                quiet_s=now - track.moved_s,
                idle_s=now - max(track.busy_s, track.moved_s),
                asked_s=track.asked_s,
                is_answered=self._has_answered(track),
                has_joined=track.evidence is not None and track.evidence.has_joined,
            )
            for number, track in self._tracks.items()
            if track.rank.is_alive and track.rank.pid
        ]

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks for the stacks of their threads and their flight recorder; never waits."""
        now = self._clock.monotonic()
        for number in ranks:
            track = self._tracks[number]
            if track.rank.is_alive and track.rank.pid:
                track.asked_s, track.has_answered = now, False
                if track.rank.evidence is not None:
                    track.rank.evidence.ask()

    def signal_silent(self) -> None:
        """Take the stacks of those that were asked and did not answer, where the signal that this takes can't disturb them.

        It reaches ranks in C code, and those that have nobody to answer yet. But it ends some waits early, and the rank
        may be
        sound: those are left alone, and nobody waits for them.
        """
        chosen = []
        for track in self._list_silent(_ANSWER_S):
            if self._is_still(track) and takes_signals(track.rank.pid):
                chosen.append(track)
            else:
                track.left_alone_s = self._clock.monotonic()
        self._signal(chosen)

    def _list_silent(self, after_s: float) -> list[_SampledRank]:
        """Return those that were asked so long ago and did not answer, or have nobody to."""
        now = self._clock.monotonic()
        return [
            track
            for track in self._tracks.values()
            if track.rank.is_alive
            and not self._has_answered(track)
            and (not self._answers(track) or (now - track.asked_s >= after_s and not has_busy_threads(track.rank.pid)))
        ]

    def _signal(self, tracks: Iterable[_SampledRank]) -> None:
        chosen = {track.rank.rank: track for track in tracks}
        if not chosen:
            return
        places = {number: (track.rank.pid, track.rank.stacks_fd) for number, track in chosen.items()}
        stacks = take_stacks(places, self._clock, _SIGNAL_S)
        for number, track in chosen.items():
            track.signalled, track.signalled_s = stacks.get(number), self._clock.monotonic()

    @staticmethod
    def _has_answered(track: _SampledRank) -> bool:
        """Whether there is nothing to wait for: what it was asked has been read, or it can't answer."""
        if track.has_answered or max(track.signalled_s, track.left_alone_s) >= track.asked_s:
            return True
        return track.process is not None and track.process.state in {"stopped", "ended"}

    @staticmethod
    def _answers(track: _SampledRank) -> bool:
        """Whether the rank has the thread that answers: from init_process_group on."""
        evidence = track.evidence if track.rank.evidence is not None else None
        return evidence is not None and (evidence.has_come or evidence.has_joined)

    # ----------------------------------------------------------------- scenes

    def take(self) -> Scene:
        """Return all ranks as they were at the last look."""
        now = self._clock.monotonic()
        still = [track for track in self._tracks.values() if track.rank.is_alive and self._is_still(track)]
        children = self._processes.read_children([track.rank.pid for track in still], now) if still else {}
        scene = Scene(
            ranks=tuple(
                self._to_facts(track, now, children.get(track.rank.pid, ()))
                for _, track in sorted(self._tracks.items())
            ),
            world_size=self._world_size,
            now_s=now,
            is_whole=len(self._tracks) == self._world_size,
            has_agent_store=self._has_agent_store,
        )
        return self._processes.add_stacks(scene)

    def take_end(self) -> Scene:
        """Take the scene when all ranks have ended."""
        self.look(budget_s=_LAST_READING_S)
        return self.take()

    def take_last(self, *, wait_s: float) -> Scene:
        """Take the scene before the ranks are stopped; each gets the stack that it has now, by a signal if need be.

        Args:
            wait_s: How long to wait at most for answers.
        """
        begin = self._clock.monotonic()
        living = [track for track in self._tracks.values() if track.rank.is_alive and track.rank.pid]
        self.ask(track.rank.rank for track in living)
        for track in living:
            if not self._answers(track):
                self._look_at_evidence(track, begin, may_read=True)  # it may just have met the others
        end = begin + wait_s
        for track in living:
            place = track.rank.evidence
            if place is not None and self._answers(track):
                place.wait_answer(self._clock, max(0.0, end - self._clock.monotonic()))
        self.look(budget_s=max(wait_s, _READING_S))
        # At the very last: a rank whose wait it ends goes on.
        self._signal(self._list_silent(0.0))
        for track in living:
            stack, reported_s = track.newest_stack
            track.rank.stack = stack if reported_s >= begin else None
        return self.take()

    def _is_still(self, track: _SampledRank) -> bool:
        return self._clock.monotonic() - max(track.moved_s, track.busy_s) >= 1.0

    def _to_facts(self, track: _SampledRank, now: float, children: tuple[Child, ...]) -> RankFacts:
        rank, process = track.rank, track.process
        state = process.state if process is not None else "running"
        if not rank.is_alive:
            state = "ended"
        elif not rank.pid:
            state = "not started"
        return RankFacts(
            rank=rank.rank,
            pid=rank.pid,
            state=state,
            code=rank.code,
            ended_s=None if rank.is_alive else rank.ended_s,
            fault=None if rank.code == 0 else track.notes.fault,
            finished_s=track.notes.finished_s,
            left_at=track.notes.left_at,
            evidence=track.evidence,
            stack=self._find_stack(track, now),
            still_s=max(0.0, now - max(track.moved_s, track.busy_s)),
            cpu_share=track.share,
            children=children,
            reads_terminal=rank.is_alive and self._is_debugged(track, now),
            awaits=find_wait(rank.pid) if rank.is_alive and rank.pid and self._is_still(track) else "",
        )

    def _find_stack(self, track: _SampledRank, now: float) -> Stack | None:
        stack = track.find_stack(now)
        if stack is None and track.rank.is_alive and track.evidence is not None and not self._answers(track):
            return Stack()  # where it stands is not known, but that it has not reached the others is
        return stack

    def _is_debugged(self, track: _SampledRank, now: float) -> bool:
        if track.process is not None and track.process.is_traced:
            return True
        stack = track.find_stack(now)
        frames = stack.frames if stack is not None else ()
        if any(part in frame.file for frame in frames for part in _DEBUGGERS):
            return True
        return self._is_still(track) and reads_terminal(track.rank.pid)


def _progress(evidence: Evidence | None) -> object:
    """Return what differs whenever a rank has got on; an answer to a question is no such thing."""
    if evidence is None:
        return None
    newest: dict[tuple[str, str | None], int] = {}
    num_over = 0
    for op in evidence.ops:
        sequence = (op.group, f"{op.name} {op.peer}" if op.is_message else None)
        newest[sequence] = max(newest.get(sequence, 0), op.seq)
        num_over += op.is_over is True
    return evidence.has_come, evidence.has_joined, evidence.has_left, evidence.steps, newest, num_over
