"""One attempt: all ranks from their start to their end, and what is known of it afterwards."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.base.files import read_all, read_tail
from rankwise.base.os_calls import KILL_SIGNAL, listens_to
from rankwise.base.rank_names import name_ranks
from rankwise.base.requeue import END_SIGNAL
from rankwise.base.roles import name_roles
from rankwise.evidence.reader.notes import read_notes
from rankwise.evidence.reader.oom_kills import count_oom_kills
from rankwise.evidence.reader.rank_channel import RankChannel
from rankwise.evidence.reader.snapshot import take_stacks
from rankwise.launcher.attempt_signals import AttemptSignals, is_notice
from rankwise.launcher.output import Pump, read_last_words
from rankwise.launcher.rank_end import Rank, describe_end, find_ending
from rankwise.launcher.rank_start import RankStarter
from rankwise.launcher.requeue_watch import RequeueWatch
from rankwise.launcher.restart_policy import decide, to_failure
from rankwise.launcher.single_rank_restart import SingleRankRestarts
from rankwise.launcher.tee import Tee
from rankwise.launcher.workers import (
    STORE_TAG,
    Change,
    Cooled,
    Ended,
    NotStarted,
    Started,
    SupervisorLost,
    Warmed,
)
from rankwise.verdict.case import Case, RankEnd
from rankwise.verdict.exit_codes import is_abort_at_exit
from rankwise.verdict.requeue import is_requeue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.launcher.job import Job
    from rankwise.launcher.job_monitor import JobMonitor
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.launcher.restart_policy import Failure

_SNAPSHOT_S = 0.2
#: An import of torch takes 1 s; on a busy host, or from a network disk, half a minute is nothing odd.
_SLOW_START_S = 60.0
#: Whoever waits longer than this is told what for.
_SILENCE_S = 2.0
#: A rank that has raised is given this long to end by itself, so that its exit code is its own.
_LAST_BREATH_S = 2.0
#: And this long to write its exception down, if all ranks start again anyway.
_LAST_NOTE_S = 0.1
#: The last words of a rank that has ended reach us within this.
_LAST_WORDS_S = 0.5
#: Ranks that take SIGTERM for a notice, and have nothing to save after a failure, get this long to end.
_PARTING_S = 2.0
_ORPHAN_GRACE_S = 5.0
#: All processes of a node are killed within this.
_NODE_KILL_S = 0.5
_KILL_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an attempt came to.

    Attributes:
        monitor: Looks on while other nodes' ranks still run.
        regroup: Whether it was ended because another node wants to join.
        imported: How many modules of each package a rank imported itself, in place of a warm server.
        open_streams: Standard errors that processes left on purpose still write to.
    """

    case: Case
    monitor: JobMonitor
    regroup: bool = False
    lasted_s: float = 0.0
    imported: dict[str, int] = field(default_factory=dict)
    open_streams: list[int] = field(default_factory=list)


@final
class Attempt:
    """Starts the ranks of one attempt and sees them through."""

    def __init__(self, job: Job, part: Assignment, *, index: int, restarts: int, failures: list[Failure]) -> None:
        """Open the streams of all ranks.

        Args:
            job: Whose attempt it is.
            part: Which ranks are ours this time.
            index: Number of the attempt, from 0.
            restarts: How often all ranks were started again after a failure: an attempt ended for a joining node is
                none.
            failures: Those that came before; gets those after which a rank starts alone.
        """
        self._job, self._part, self._index, self._restarts = job, part, index, restarts
        self._failures, self._single_restarts = failures, SingleRankRestarts(job, part, failures)
        self._clock, self._workers = job.clock, job.workers
        self._folder = job.folder / f"attempt_{index}"
        self._pump, self._tee = Pump(job.console), Tee(job.console)
        # The last attempt's may take a while to go, and is not mistaken for this one's.
        suffix = f"{index}" if job.serial is None else f"{index}.{job.serial}"
        records = job.spec.watch and RankChannel.is_affordable(job.num_ranks)
        if job.spec.watch and not records and index == 0:
            job.console.say(
                f"rankwise: the limit of open files (ulimit -n) is too low to record what {job.num_ranks} ranks do"
            )
        self._starter = RankStarter(
            job, part, self._folder, suffix=suffix, records=records, returns=self._single_restarts.is_on,
            pump=self._pump, tee=self._tee,
        )  # fmt: skip
        self._ranks = [self._starter.open(local) for local in range(job.num_ranks)]
        self._store_tag = f"{STORE_TAG}{suffix}"
        self._by_tag = {rank.tag: rank for rank in self._ranks}
        self._oom_before = count_oom_kills() or 0
        self._started_s = self._clock.monotonic()
        self._signals = AttemptSignals(job, self._pump)
        self._store_code: int | None = None
        self._supervisor_lost = self._regroup = False
        self._has_said_slow = self._has_lost_nodes = False
        self._requeue = RequeueWatch(job.spec.shutdown_timeout_s, job.clock, is_on=job.serial is None)

    # ------------------------------------------------------------------ start

    def _start(self) -> None:
        job, part = self._job, self._part
        job.warm.begin_attempt()
        self._starter.start_store(self._store_tag)
        for rank in self._ranks:
            self._starter.start(rank, restarts=self._restarts)
            if not self._single_restarts.is_on:
                rank.streams.close_rank_end()
        job.warm.tell(job.events)
        self._pump.start()
        self._tee.start()
        job.events.write("ranks.started", attempt=self._index, num=len(self._ranks), world_size=part.world_size)
        # While the ranks start: with all rules of the verdict it takes 0.04 s.
        from rankwise.launcher.job_monitor import JobMonitor  # noqa: PLC0415
        from rankwise.launcher.late_imports import LateImports  # noqa: PLC0415

        self._monitor: JobMonitor = JobMonitor(job, part, self._ranks, self._folder)
        self._late_imports = LateImports(self._clock)
        if job.check is not None and self._index == 0:
            job.check.start()

    # ------------------------------------------------------------------ watch

    def run(self) -> Outcome:
        """Start, watch until all ranks have ended or one has failed, and clear up."""
        self._start()
        while any(rank.is_alive for rank in self._ranks) and not self._is_over():
            self._look(self._watch_every_s())
            self._restart_alone()
            self._say_slow_start()
            # Ranks that follow one that has left have a bound of their own.
            if not (self._is_over() or self._requeue.has_begun):
                self._monitor.poll()
                self._late_imports.poll()
        clean = not self._is_over()
        if clean:
            self._monitor.take_end()
        # Another node's agent may have been quicker to see who joins: then its notice has ended our ranks too.
        if clean and self._requeue.has_begun and not self._job.spec.is_one_node:
            self._regroup = self._job.rendezvous.nodes_waiting() > 0
        if not clean:
            self._end_all()
        for rank in self._ranks:
            rank.streams.close_rank_end()
        self._tee.finish()
        streams = self._pump.finish()
        self._monitor.tell_end()
        case = self._monitor.add_end(self._to_case(self._ranks))
        # Ranks of other nodes, on their way out as ours were, may still need the store.
        is_needed = is_requeue(case) and not self._regroup
        if not is_needed and (not clean or self._regroup or self._job.serial is not None):
            self._end_store()
        lasted_s = self._clock.monotonic() - self._started_s
        imported = read_notes(read_all(self._ranks[0].notes_fd)).imported
        for rank in self._ranks:
            rank.close()
        return Outcome(
            case=case,
            monitor=self._monitor,
            regroup=self._regroup,
            lasted_s=lasted_s,
            imported=imported,
            open_streams=streams,
        )

    def _end_all(self) -> None:
        """Report to the other nodes, look at the living ranks, and stop them."""
        killed = [rank for rank in self._ranks if rank.code == -KILL_SIGNAL]
        if self._interrupted is not None or not killed:
            self._publish_end()
        if not (self._regroup or self._supervisor_lost or self._has_lost_nodes):
            self._take_evidence()
        # Those that have not followed by now had the time that others get after SIGTERM.
        self._signals.hurry |= self._is_overdue()
        self._stop(self._interrupted or signal.SIGTERM)
        if self._interrupted is None and not (self._regroup or self._has_lost_nodes):
            self._outlive(killed)
            self._publish_end()  # the first rank to fail may take longer to end than those that have only lost it
        self._workers.sweep(0.0 if self._signals.hurry else _ORPHAN_GRACE_S)
        self._signals.take(self._living())

    def _outlive(self, killed: Sequence[Rank]) -> None:
        """See whether this launcher outlives its killed ranks: whoever kills a node may begin with them, and the others then have lost a node."""
        if self._part.link is None or not killed:
            return
        end_s = max(rank.ended_s for rank in killed) + _NODE_KILL_S
        while (left_s := end_s - self._clock.monotonic()) > 0 and self._interrupted is None:
            self._look(left_s)

    def _restart_alone(self) -> None:
        """Start ranks again that have failed, where the others can go on without them meanwhile."""
        if self._is_ended or self._requeue.has_begun or self._store_code is not None:
            return
        for rank in [one for one in self._ranks if self._single_restarts.is_on and self._has_failed(one)]:
            if not self._single_restarts.takes(rank, self._ranks, self._to_case([rank])):
                return
            del self._by_tag[rank.tag]
            if rank.pid:  # what it has started, and left behind
                self._workers.sweep(_ORPHAN_GRACE_S, session=rank.pid)
            self._pump.begin_again(rank.local_rank)
            rank.begin_again(*self._starter.open_evidence(rank.streams.folder))
            self._by_tag[rank.tag] = rank
            self._monitor.renew(rank)
            self._starter.start(rank, restarts=self._restarts)

    @property
    def _is_ended(self) -> bool:
        """Whether the user, a proof, or another node has ended the attempt, however the ranks are."""
        elsewhere = None if self._part.link is None else self._part.link.ended_elsewhere
        has_been_ended = self._interrupted is not None or self._supervisor_lost or self._monitor.has_hung
        return has_been_ended or elsewhere is not None

    def _publish_end(self) -> None:
        """Report to the other nodes that this attempt ends here, and why: their ranks would wait for ours, over NCCL for minutes."""
        link, spec = self._part.link, self._job.spec
        if link is None or link.has_end or self._monitor.has_hung:
            return
        from rankwise.verdict.first_failure import judge  # noqa: PLC0415 - not before the ranks' start

        failed = [rank for rank in self._ranks if rank.stopped_s is None and self._has_failed(rank)]
        verdict = judge(self._to_case(failed or self._ranks))
        if self._interrupted is not None:
            # Other nodes may go on without this one, unless ranks with roles were to come back alone.
            has_notice = any(is_notice(self._interrupted, rank) for rank in self._living())
            num_there = self._part.num_nodes - len(link.lost_nodes) + self._job.rendezvous.nodes_standing_by()
            is_spare = num_there > spec.min_nodes
            if has_notice or (not self._single_restarts.is_on and (is_spare or spec.max_restarts)):
                if is_spare and not has_notice:
                    link.leave()
                return
        elif not (self._supervisor_lost or self._store_code is not None) and (not failed or verdict.lacks_cause):
            return
        lasted_s = self._clock.monotonic() - self._started_s
        reason = decide([*self._failures, to_failure(verdict, lasted_s=lasted_s)], spec.max_restarts)
        gives_up = self._interrupted is not None or self._supervisor_lost or reason is not None
        link.end_attempt(
            name_roles(verdict.message, spec.roles), code=verdict.exit_code, gives_up=gives_up,
            host_problems=self._monitor.find_host_problems() if gives_up else (),
        )  # fmt: skip

    def _say_slow_start(self) -> None:
        if self._has_said_slow or any(rank.pid for rank in self._ranks):
            return
        waited_s = self._clock.monotonic() - self._started_s
        if waited_s > _SLOW_START_S:
            self._has_said_slow = True
            self._job.console.say(
                f"rankwise: no rank has started after {waited_s:.0f} s: the warm server is still importing torch and what else the script needs"
            )

    def _is_over(self) -> bool:
        """Whether there is no point in going on."""
        if self._is_ended or self._regroup or self._has_lost_nodes:
            return True
        alive = any(rank.is_alive for rank in self._ranks)
        if alive and (self._store_code is not None or self._is_overdue()):
            return True
        return any(self._has_failed(rank) for rank in self._ranks)

    def _is_overdue(self) -> bool:
        return self._interrupted is None and self._requeue.is_overdue()

    def _has_failed(self, rank: Rank) -> bool:
        if rank.code != -signal.SIGABRT:
            return bool(rank.code) and not self._requeue.takes(rank.code, rank.notes_fd)
        end = self._to_end(rank)
        # What it wrote last may still be on its way to us: without that nobody can tell an abort at exit.
        is_fresh = self._clock.monotonic() - rank.ended_s < _LAST_WORDS_S
        return not is_abort_at_exit(end) and (end.finished_s is None or not is_fresh)

    def _watch_every_s(self) -> float:
        if any(rank.code == -signal.SIGABRT for rank in self._ranks):
            return 0.05
        every_s = 1.0 if self._job.spec.is_one_node else self._job.spec.monitor_interval_s
        return min(every_s, self._monitor.next_in_s)

    def _look(self, timeout_s: float) -> None:
        for change in self._workers.wait_change(timeout_s):
            self._note(change)
        self._signals.take(self._living())
        # A job that has just ended, well or not, is not started again because somebody knocks.
        can_regroup = not self._job.spec.is_one_node and self._living() and not self._is_over()
        if can_regroup and not self._requeue.has_begun and self._job.rendezvous.has_to_regroup():
            self._regroup = True
        if can_regroup and (link := self._part.link) is not None:
            self._has_lost_nodes = bool(link.given_up) or not self._single_restarts.continues_without(
                link.lost_nodes, self._ranks
            )

    def _note(self, change: Change) -> None:
        match change:
            case Started(tag=tag, pid=pid):
                if rank := self._by_tag.get(tag):
                    rank.pid = pid
                if all(rank.pid for rank in self._ranks):
                    self._job.warm.note_all_started()
            case Warmed() | Cooled():
                self._job.warm.note(change)
                self._job.warm.tell(self._job.events)
            case NotStarted(tag=tag, error=error):
                self._note_end(tag, 127, self._clock.monotonic(), refusal=error)
            case Ended(tag=tag, code=code, at_s=at_s):
                self._note_end(tag, code, at_s)
            case SupervisorLost():
                self._supervisor_lost = True
                now = self._clock.monotonic()
                for rank in self._living():
                    rank.code, rank.ended_s, rank.stopped_s = -KILL_SIGNAL, now, now

    def _note_end(self, tag: str, code: int, at_s: float, refusal: str = "") -> None:
        if rank := self._by_tag.get(tag):
            rank.note_end(code, at_s, refusal)
            self._requeue.note(code, rank.notes_fd)
            self._job.events.write("rank.ended", rank=rank.rank, code=code)
        elif tag == self._store_tag:
            self._store_code = code

    @property
    def _interrupted(self) -> int | None:
        return self._signals.interrupted

    def _living(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.is_alive]

    # -------------------------------------------------------------------- end

    def _take_evidence(self) -> None:
        """Look at the living before they are stopped: what they wait for is half of the answer."""
        is_last = len(self._failures) >= self._job.spec.max_restarts
        self._monitor.take_last(is_final=is_last and self._interrupted is None)
        # What has raised writes it down first of all. Its own exit code is worth a wait only in the last report.
        end = self._clock.monotonic() + (_LAST_BREATH_S if is_last else _LAST_NOTE_S)
        while self._clock.monotonic() < end and self._interrupted is None:
            if not any(self._is_leaving(rank, is_last=is_last) for rank in self._living()):
                return
            self._look(0.02 if is_last else 0.005)

    def _is_leaving(self, rank: Rank, *, is_last: bool) -> bool:
        if read_notes(read_all(rank.notes_fd)).fault is not None:
            return is_last
        return rank.stack is not None and rank.stack.is_farewell

    def _stop(self, number: int) -> None:
        """End all living ranks: the signal, the user's time to save, SIGKILL for whole groups."""
        self._look_who_is_over()
        bounds_s = [0.0]
        for rank in self._living():
            bounds_s.append(self._send_stop(rank, number))
            if hasattr(signal, "SIGCONT"):
                self._workers.signal(rank.tag, signal.SIGCONT)
        begin, is_reported = self._clock.monotonic(), False
        end = begin + max(bounds_s)
        while self._living() and self._clock.monotonic() < end and not self._signals.hurry:
            self._look(min(0.5, max(0.0, end - self._clock.monotonic())))
            if not is_reported and self._living() and self._clock.monotonic() - begin > _SILENCE_S:
                is_reported = True
                self._say_stopping(end)
        self._look_who_is_over()
        end = self._clock.monotonic() + _KILL_TIMEOUT_S
        for rank in self._living():
            rank.stopped_s = rank.stopped_s or self._clock.monotonic()
            rank.was_killed = True
            self._job.events.write("rank.killed", rank=rank.rank)
            self._workers.signal(rank.tag, KILL_SIGNAL, tree=True)
        while self._living() and self._clock.monotonic() < end:
            self._look(0.1)

    def _look_who_is_over(self) -> None:
        """See which ranks are through with their scripts: those don't hang while they save, but may have failed at it."""
        if not self._requeue.has_begun:
            return
        living = {rank.rank: rank for rank in self._living() if rank.pid and rank.over_s is None}
        places = {number: (rank.pid, rank.stacks_fd) for number, rank in living.items()}
        now = self._clock.monotonic()
        for number, stack in take_stacks(places, self._clock, _SNAPSHOT_S).items():
            if stack.is_farewell:
                living[number].over_s = now

    def _send_stop(self, rank: Rank, number: int) -> float:
        """Tell a rank to stop, and return how many seconds it may take."""
        fails = self._interrupted is None and not self._regroup
        if END_SIGNAL is not None and fails and listens_to(rank.pid, END_SIGNAL, or_ignores=True):
            # SIGTERM is a notice to it. With a rank that has failed it could never agree on a step to save at.
            rank.stopped_s = self._clock.monotonic()
            self._workers.signal(rank.tag, END_SIGNAL)
            return min(_PARTING_S, self._job.spec.shutdown_timeout_s)
        rank.was_noticed = is_notice(number, rank)
        if not rank.was_noticed:
            rank.stopped_s = self._clock.monotonic()
        self._workers.signal(rank.tag, number, tree=self._job.spec.program.how == "program")
        return self._job.spec.shutdown_timeout_s

    def _say_stopping(self, end: float) -> None:
        named = name_ranks([rank.rank for rank in self._living()])
        rest = end - self._clock.monotonic()
        now = "; Ctrl-C again kills now" if self._interrupted is not None else ""
        self._job.console.say(f"rankwise: waiting for {named} to stop, {max(0.0, rest):.0f} s at most{now}")

    def _end_store(self) -> None:
        """End the store, and see it gone where the next attempt wants the same port."""
        end = self._clock.monotonic() + _KILL_TIMEOUT_S
        self._workers.signal(self._store_tag, KILL_SIGNAL)
        if self._part.num_nodes == 1 and not self._job.spec.master_port:
            return
        while self._part.listener is not None and self._store_code is None and not self._supervisor_lost:
            self._look(0.1)
            if self._clock.monotonic() > end:
                return

    def _to_end(self, rank: Rank) -> RankEnd:
        # The kernel, for memory, while the others waited for it to follow: that is no end of our doing.
        by_another = rank.code == -KILL_SIGNAL and not rank.was_killed and not self._supervisor_lost
        return describe_end(
            rank,
            last_words=rank.refusal or read_last_words(rank.streams, self._pump, find_ending(rank)),
            stopped_s=None if by_another and self._requeue.has_begun else rank.stopped_s,
            asks_requeue=self._requeue.takes(rank.code, rank.notes_fd),
            expired="" if self._job.timers is None else self._job.timers.find_expired(rank.pid),
        )

    def _to_case(self, ranks: Sequence[Rank]) -> Case:
        try:
            shm = os.statvfs("/dev/shm")
            shm_free: int | None = shm.f_bavail * shm.f_frsize
        except (OSError, AttributeError):
            shm_free = None
        # Without a failed rank, a store that ended while ranks lived is the cause; else we ended it ourselves.
        store_failed = self._store_code is not None and any(rank.stopped_s is not None for rank in self._ranks)
        link = self._part.link
        return Case(
            ranks=tuple(self._to_end(rank) for rank in ranks),
            world_size=self._part.world_size,
            num_nodes=self._part.num_nodes,
            attempt=self._index,
            started_s=self._started_s,
            oom_kills=max(0, (count_oom_kills() or 0) - self._oom_before),
            shm_free_bytes=shm_free,
            interrupted=self._interrupted,
            left_behind=self._monitor.is_left_behind,
            hung=self._monitor.has_hung,
            scene=self._monitor.scene,
            findings=self._monitor.findings,
            decided=self._monitor.decided or (),
            strict=self._job.spec.strict,
            store_code=self._store_code if store_failed else None,
            store_words=read_tail(self._folder / "store.log", 4000).decode("utf-8", "replace"),
            supervisor_lost=self._supervisor_lost,
            lost_nodes=link.lost_nodes if link is not None and self._has_lost_nodes else (),
            given_up=link.given_up if link is not None and self._has_lost_nodes else "",
            min_nodes=self._job.spec.min_nodes,
        )
