"""Where an attempt is watched from: the sampler, the watch and who is told, until the last scene before the ranks are stopped.

In a job of several nodes one of them, the judge, sees the ranks of all and decides for all; the others tell it of theirs. Whatever
is decided is known to every node before the first rank of any is stopped: ranks elsewhere would only complain of a lost peer.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar, final

from rankwise.base.roles import name_roles
from rankwise.evidence.reader.multi_node_scene import NodeScene, count_ops, join, pack
from rankwise.evidence.reader.own_processes import with_stacks
from rankwise.evidence.reader.source_lines import with_sources
from rankwise.launcher.all_nodes_sampler import AllNodesSampler
from rankwise.launcher.hang_watch import Bounds, Event, HangWatch
from rankwise.launcher.node_responder import NodeResponder
from rankwise.launcher.rank_sampler import RankSampler
from rankwise.verdict import evidence_folder
from rankwise.verdict.case_file import read_findings, write_findings
from rankwise.verdict.early_exits import find_early_exits
from rankwise.verdict.hosts import with_hosts
from rankwise.verdict.report import render_finding
from rankwise.verdict.run_rules import look

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rankwise.evidence.reader.scene import Scene
    from rankwise.launcher.job import Job
    from rankwise.launcher.node_link import NodeLink
    from rankwise.launcher.rank_end import Rank
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.verdict.case import Case
    from rankwise.verdict.finding import JobFinding

_Result = TypeVar("_Result")
JobEnd = Literal["hung", "lost", "through"]
#: How long answers are waited for before the ranks are stopped: a restart must not wait for them, the last report may.
_LAST_ANSWER_S, _ANSWER_S = 0.5, 0.1
#: A job may end while its nodes part; only after so long is it said that they have.
_PARTED_S = 3.0
#: When a peer was lost, so long the other nodes may take to tell how their ranks have ended.
_LEAVE_S, _SOON_S = 2.0, 0.05
#: So long what all nodes have left is read at the job's end.
_LAST_READING_S = 2.0


class HungElsewhere(Exception):  # noqa: N818 - it is no error
    """Ranks of other nodes hang, while ours have ended and wait for them to."""


@final
class JobMonitor:
    """Sees one attempt from its start to its end.

    Args:
        job: Whose attempt it is.
        part: Which ranks are ours this time.
        ranks: The ranks, which the attempt goes on changing.
        folder: Of the attempt's logs.

    Attributes:
        scene: The last one that was taken at the attempt's end; None before, and if nobody watches.
        decided: What all nodes of the job have come to, the cause first; None before, and on one node.
    """

    def __init__(self, job: Job, part: Assignment, ranks: Sequence[Rank], folder: Path) -> None:
        self._is_on = job.spec.watch
        self._ranks, self._say = ranks, job.console.say
        self._sampler = RankSampler(ranks, part.world_size, job.clock, has_agent_store=not part.rank0_serves)
        self._clock = job.clock
        self._link = link = part.link if job.spec.watch else None
        self._host_check = job.host_check
        self._all = self._answers = None
        if link is not None and link.is_judge:
            self._all = AllNodesSampler(self._sampler, link, self._say, job.clock)
        elif link is not None:
            self._answers = NodeResponder(self._sampler, link, job.clock, self.find_host_problems)
        bounds = Bounds(timeout_s=job.spec.hang_timeout_s, on_hang=job.spec.on_hang)
        self._job, self._evidence = job, folder / "evidence"
        self._asking: threading.Thread | None = None
        self._watch = HangWatch(self._all or self._sampler, self._judge, bounds, job.clock)
        self._parted_s: float | None = None
        self.scene: Scene | None = None
        self.decided: tuple[JobFinding, ...] | None = None
        self._own_host_problems: tuple[str, ...] = ()
        self._host_problems_elsewhere: tuple[str, ...] = ()

    @property
    def next_in_s(self) -> float:
        """Return after how many seconds it wants to be polled."""
        if not self._is_on:
            return float("inf")
        return min(self._watch.next_in_s, self._answers.next_in_s if self._answers else float("inf"))

    @property
    def has_hung(self) -> bool:
        """Whether the attempt is to end because its ranks hang."""
        return self._watch.has_decided or self.decided is not None

    @property
    def is_left_behind(self) -> bool:
        """Whether they hang, and others had left by themselves without an error."""
        return self.has_hung and any(rank.code == 0 and rank.stopped_s is None for rank in self._ranks)

    @property
    def host_problems(self) -> tuple[str, ...]:
        """What is wrong with this host, as it was when the attempt failed or hung, and, with their names, with others."""
        end = None if self._link is None else self._link.ended_elsewhere
        found = self._host_problems_elsewhere or (self._all.list_host_problems() if self._all else ())
        return (*self._own_host_problems, *(found or (end.host_problems if end is not None else ())))

    def find_host_problems(self) -> tuple[str, ...]:
        """Look what is wrong with this host now."""
        return (self._try(self._host_check.find_host_problems) or ()) if self._host_check else ()

    @property
    def findings(self) -> tuple[JobFinding, ...]:
        """What was proved while the ranks ran, here or on another node."""
        keys = {finding.key for finding in self.decided or ()}
        return (
            *(self.decided or ()),
            *(finding for finding in self._watch.findings if finding.key not in keys),
        )

    def renew(self, rank: Rank) -> None:
        """Forget what was seen of a rank that is started again alone."""
        self._sampler.renew(rank)

    def poll(self) -> None:
        """Look, if it is time to."""
        if self._is_on:
            self._try(self._poll)

    def _poll(self) -> None:
        events = self._watch.poll(
            has_ended=not all(rank.is_alive for rank in self._ranks),
            is_led=self._answers is not None and self._answers.has_judge,
        )
        for event in events:
            self._report(event)
        if self._answers is not None:
            self._answers.poll()
        self._settle()

    def _settle(self) -> None:
        """Have all nodes end the attempt alike, whichever has decided that."""
        link = self._link
        if link is None or self.decided is not None:
            return
        decision = link.decision
        if decision is None and self._watch.has_decided:
            decision = link.decide(write_findings(_order((*self._watch.current, *self._watch.findings))))
        if decision is not None:
            self._adopt(link, decision)
        elif link.lost is not None and self._parted_s is None:
            self._parted_s = self._clock.monotonic()
        elif self._parted_s is not None and self._clock.monotonic() - self._parted_s > _PARTED_S:
            self._parted_s = float("inf")
            self._say(
                f"rankwise: the other nodes can't be reached any more; from now on only the ranks of this one are watched: {link.lost}"
            )

    def _adopt(self, link: NodeLink, decision: str) -> None:
        self.decided = read_findings(decision)
        link.wait_heard("decision")

    @property
    def _stopped(self) -> set[int]:
        return {rank.rank for rank in self._ranks if rank.stopped_s is not None}

    def take_last(self, *, is_final: bool) -> None:
        """Look at all ranks before they are stopped: what the living wait for is half of the answer.

        Args:
            is_final: Whether nobody waits for a restart.
        """
        wait_s = _LAST_ANSWER_S if is_final else _ANSWER_S
        if self._asking is not None:  # what is being said comes before the report
            self._asking.join(wait_s)
        if is_final:  # a restart has no time for it
            self._own_host_problems = self.find_host_problems()
        is_watched = self._is_on
        if (scene := self._try(lambda: self._sampler.take_last(wait_s=wait_s))) is not None and is_watched:
            # What was seen elsewhere belongs to the evidence if it has decided; else each node tells of its own.
            if self.has_hung:
                scene = with_stacks(scene)
            is_joint = self._all is not None and self.has_hung and self._watch.scene is not None
            self.scene = with_sources(join(scene, [self._watch.scene]) if is_joint and self._watch.scene else scene)

    def take_end(self) -> None:
        """Look at what ranks that have all ended by themselves have left: wrong pairs show only there if they came late."""
        if self._is_on:
            # Whether two lines are meant to be paired is judged by the script's text.
            self.scene = self._try(lambda: with_sources(self._sampler.take_end()))

    def tell_end(self) -> None:
        """Tell the other nodes what our ranks have left, now that all have ended."""
        if self._is_on and self._link is not None:
            self._try(self._tell_end)

    def _tell_end(self) -> None:
        scene = self._sampler.take_end()
        stopped = tuple(sorted(self._stopped))
        own = NodeScene(
            scene=scene, activities=(), question=0, is_last=True, stopped=stopped, host_problems=self._own_host_problems
        )  # fmt: skip
        if self._answers is not None:
            self._answers.stop()
        if self._link is not None:
            self._link.publish(pack(own, most_ops=count_ops(scene.world_size)))

    def watch_on(self) -> None:
        """Go on looking while our ranks have ended and those of other nodes have not.

        Raises:
            HungElsewhere: Those hang.
        """
        self.poll()
        if self.has_hung:
            raise HungElsewhere

    def finish(self, case: Case, how: JobEnd) -> Case:
        """Return the case of our own ranks with what those of other nodes add to it.

        Args:
            case: Of our own ranks.
            how: ``hung``: ours have ended well in a job that hangs elsewhere. ``lost``: ours have lost a peer, which
                may have left another node with exit code 0; then no rank has failed. ``through``: the whole job is, and
                what ranks of different nodes have done is compared.
        """
        if how == "hung":
            scene = join(case.scene, [seen]) if self._all and case.scene and (seen := self._watch.scene) else case.scene
            scene = with_sources(scene) if scene is not None else None
            return replace(case, hung=True, decided=self.decided or (), findings=self.findings, scene=scene)
        if self._link is None:
            return case
        if how == "through":
            return self._try(lambda: self._compare(case)) or case if self._is_on and case.scene is not None else case
        if self._is_on and not self._link.lost_nodes:
            case = self._try(lambda: self._find_early_exits(case)) or case
        self._link.settle()
        case = replace(case, lost_nodes=self._link.lost_nodes, given_up=self._link.given_up)
        return self.add_end(case)

    def add_end(self, case: Case) -> Case:
        """Return a case with what has failed on another node that has ended the attempt."""
        end = None if self._link is None else self._link.ended_elsewhere
        return case if end is None else replace(case, elsewhere=end.why, elsewhere_code=end.code)

    def _find_early_exits(self, case: Case) -> Case:
        link = self._link
        if link is None:
            return case
        everyone = self._all or AllNodesSampler(self._sampler, link, self._say, self._clock)
        end, ends = self._clock.monotonic() + _LEAVE_S, everyone.list_ends()
        while link.decision is None and ends is None and not link.lost_nodes and link.ended_elsewhere is None:
            if self._clock.monotonic() > end or not link.collect():
                self._host_problems_elsewhere = everyone.list_host_problems()
                return case
            everyone.read_all(_LAST_READING_S)
            ends = everyone.list_ends()
            self._clock.sleep(_SOON_S)
        self._host_problems_elsewhere = everyone.list_host_problems()
        decision = link.decision
        if decision is None and ends and case.scene is not None:
            scene = join(self._sampler.take_end(), (one.scene for one in ends))
            stopped = {rank for one in ends for rank in one.stopped} | self._stopped
            finding = find_early_exits(scene, stopped)
            decision = None if finding is None else link.decide(write_findings(self._name_hosts((finding,))))
        if decision is None:
            return case
        self._adopt(link, decision)
        return self.finish(case, "hung")

    def _compare(self, case: Case) -> Case:
        link, everyone, own = self._link, self._all, case.scene
        if link is None or own is None:
            return case
        if everyone is None:
            findings = read_findings(link.wait_word())
        else:
            link.collect()
            everyone.read_all(_LAST_READING_S)
            own = with_sources(everyone.with_others(own))
            findings = self._name_hosts(tuple(finding for finding in look(own) if finding.kind == "mismatch"))
            link.say_word(write_findings(findings))
        link.wait_heard("word")
        return replace(case, decided=findings, scene=own) if findings else case

    def _judge(self, scene: Scene) -> tuple[JobFinding, ...]:
        """Judge by the text of the script too: whether a line stands under a rank test, or in a finally."""
        return self._name_hosts(look(with_sources(scene)))

    def _report(self, event: Event) -> None:
        """Say what is seen in a line; of a rank that waits for its data loader once it is known where the workers are."""
        finding, scene = event.finding, event.scene
        self._job.events.write(
            "hang.seen", rule=finding.rule, certainty=finding.certainty, culprits=finding.culprits, message=finding.message,
            waited_s=round(event.waited_s, 1),
        )  # fmt: skip
        # To ask the workers takes a moment, which the loop that watches does not have; those of other hosts are not
        # seen here.
        if finding.doing == "loading data" and self._job.spec.is_one_node:
            self._asking = threading.Thread(
                target=self._report_places, args=(finding, scene), name="rankwise-places", daemon=True
            )
            self._asking.start()
        else:
            self._say_finding(finding, scene)

    def _report_places(self, finding: JobFinding, scene: Scene) -> None:
        seen = with_stacks(scene)
        placed = next((one for one in look(with_sources(seen)) if one.key == finding.key), finding)
        self._say_finding(placed, seen)

    def _say_finding(self, finding: JobFinding, scene: Scene) -> None:
        """Say it, and keep what it was seen in."""
        job = self._job
        text = f"rankwise: {name_roles(render_finding(finding, now_s=scene.now_s), job.spec.roles)}"
        # A function's caller removes the folder, and with --log-dir /dev/null nobody wants one.
        if finding.is_proof and job.serial is None and not job.spec.logs.is_off:
            try:
                evidence_folder.save(self._evidence, scene=with_sources(scene))
                text += f"\n  -> evidence: {self._evidence}"
            except OSError as error:
                text += f"\n  (the evidence can't be written to {self._evidence}: {error.strerror})"
        self._say(text)

    def _name_hosts(self, findings: tuple[JobFinding, ...]) -> tuple[JobFinding, ...]:
        nodes = [(node.host, node.ranks) for node in self._link.nodes.values()] if self._link else []
        return tuple(with_hosts(finding, nodes) for finding in findings)

    def _try(self, action: Callable[[], _Result]) -> _Result | None:
        """Do something; a fault in the watch ends the watch, and never the job."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever a rule may stumble over
            self._is_on = False
            self._say(f"rankwise: the watch for hangs has failed and is off; the job continues: {error!r}")
            return None


def _order(findings: tuple[JobFinding, ...]) -> tuple[JobFinding, ...]:
    """Return what is seen, and then what was proved before, each once, and the cause first: collectives that do not correspond."""
    once: dict[str, JobFinding] = {}
    for finding in findings:
        once.setdefault(finding.key, finding)
    return tuple(sorted(once.values(), key=lambda finding: finding.kind != "mismatch" or finding.is_drift))
