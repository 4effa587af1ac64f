"""Where an attempt is watched from: the camera, the watch and who is told, until the last scene before the ranks are stopped.

In a job of several nodes one of them, the judge, sees the ranks of all and decides for all; the others tell it of theirs. Whatever
is decided is known to every node before the first rank of any is stopped: ranks elsewhere would only complain of a lost peer.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, final

from rankwise.base.roles import name_roles
from rankwise.evidence.joint_scene import NodeScene, count_ops, join, pack
from rankwise.evidence.loader_workers import with_places
from rankwise.evidence.source import with_sources
from rankwise.launcher.all_nodes import AllNodes
from rankwise.launcher.camera import Camera
from rankwise.launcher.hang_watch import Bounds, HangWatch
from rankwise.launcher.node_answers import NodeAnswers
from rankwise.launcher.own_children import OwnChildren
from rankwise.verdict import evidence_folder
from rankwise.verdict.case_file import read_sights, write_sights
from rankwise.verdict.hosts import with_hosts
from rankwise.verdict.leavers import find_leavers
from rankwise.verdict.look import look
from rankwise.verdict.report import render_sight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rankwise.evidence.facts import Scene
    from rankwise.launcher.job import Job
    from rankwise.launcher.node_link import NodeLink
    from rankwise.launcher.rank_end import Rank
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.verdict.case import Case
    from rankwise.verdict.sight import Sight

_Result = TypeVar("_Result")
#: How long answers are waited for before the ranks are stopped: a restart must not wait for them, the last report may.
_LAST_ANSWER_S, _ANSWER_S = 0.5, 0.1
#: A job may end while its nodes part; only after so long is it said that they have.
_PARTED_S = 3.0
#: When a peer was lost, so long the other nodes may take to tell how their ranks have ended.
_LEAVE_S, _SOON_S = 2.0, 0.05
#: So long what all nodes have left is read at the job's end.
_LAST_READING_S = 2.0


class HungMeanwhile(Exception):  # noqa: N818 - it is no error
    """Ranks of other nodes hang, while ours have ended and wait for them to."""


@final
class Lookout:
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
        self._camera, self._clock = Camera(ranks, part.world_size, job.clock), job.clock
        self._link = link = part.link if job.spec.watch else None
        self._host_look = job.host_look
        self._all = self._answers = None
        if link is not None and link.is_judge:
            self._all = AllNodes(self._camera, link, self._say, job.clock)
        elif link is not None:
            self._answers = NodeAnswers(self._camera, link, job.clock, self._find_ailments)
        bounds = Bounds(timeout_s=job.spec.hang_timeout_s, on_hang=job.spec.on_hang)
        self._children = OwnChildren(self._say)
        self._notes = _Notes(job, folder / "evidence")
        self._watch = HangWatch(
            self._all or self._camera, self._look, self._notes, bounds, job.clock, is_led=self._is_led
        )
        self._parted_s: float | None = None
        self._seen: Scene | None = None
        self._current: tuple[Sight, ...] = ()
        self.scene: Scene | None = None
        self.decided: tuple[Sight, ...] | None = None
        self._own_ailments: tuple[str, ...] = ()
        self._ailments_elsewhere: tuple[str, ...] = ()

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
    def ailments(self) -> tuple[str, ...]:
        """What is wrong with this host, as it was when the attempt failed or hung, and, with their names, with others."""
        told = self._ailments_elsewhere or (self._all.list_ailments() if self._all else ())
        return (*self._own_ailments, *told)

    def _find_ailments(self) -> tuple[str, ...]:
        return self._host_look.find_ailments() if self._host_look else ()

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What was proved while the ranks ran, here or on another node."""
        keys = {sight.key for sight in self.decided or ()}
        return (*(self.decided or ()), *(sight for sight in self._watch.sights if sight.key not in keys))

    def renew(self, rank: Rank) -> None:
        """Forget what was seen of a rank that is started again alone."""
        self._camera.renew(rank)

    def poll(self) -> None:
        """Look, if it is time to."""
        if self._is_on:
            self._try(self._poll)

    def _poll(self) -> None:
        self._watch.poll(has_ended=not all(rank.is_alive for rank in self._ranks))
        if self._answers is not None:
            self._answers.poll()
        self._settle()

    def _settle(self) -> None:
        """Have all nodes end the attempt alike, whichever has decided that."""
        link = self._link
        if link is None or self.decided is not None:
            return
        told = link.decision
        if told is None and self._watch.has_decided:
            told = link.decide(write_sights(_order((*self._current, *self._watch.sights))))
        if told is not None:
            self._adopt(link, told)
        elif link.lost is not None and self._parted_s is None:
            self._parted_s = self._clock.monotonic()
        elif self._parted_s is not None and self._clock.monotonic() - self._parted_s > _PARTED_S:
            self._parted_s = float("inf")
            self._say(
                f"rankwise: the other nodes can't be reached any more; from now on only the ranks of this one are watched: {link.lost}"
            )

    def _adopt(self, link: NodeLink, told: str) -> None:
        self.decided = read_sights(told)
        link.wait_heard()

    @property
    def _stopped(self) -> set[int]:
        return {rank.rank for rank in self._ranks if rank.stopped_s is not None}

    def _is_led(self) -> bool:
        return self._answers is not None and self._answers.has_judge

    def take_last(self, *, is_final: bool) -> None:
        """Look at all ranks before they are stopped: what the living wait for is half of the answer.

        Args:
            is_final: Whether nobody waits for a restart.
        """
        wait_s = _LAST_ANSWER_S if is_final else _ANSWER_S
        self._notes.finish(wait_s)
        if is_final:  # a restart has no time for it
            self._own_ailments = self._try(self._find_ailments) or ()
        is_watched = self._is_on
        if (scene := self._try(lambda: self._camera.take_last(wait_s=wait_s))) is not None and is_watched:
            # What was seen elsewhere belongs to the evidence if it has decided; else each node tells of its own.
            if self.has_hung:
                scene = with_places(scene)
            is_joint = self._all is not None and self.has_hung and self._seen is not None
            self.scene = with_sources(join(scene, [self._seen]) if is_joint and self._seen else scene)

    def take_end(self) -> None:
        """Look at what ranks that have all ended by themselves have left: wrong pairs show only there if they came late."""
        if self._is_on:
            # Whether two lines are meant to be paired is judged by the script's text.
            self.scene = self._try(lambda: with_sources(self._camera.take_end()))

    def tell_end(self) -> None:
        """Tell the other nodes what our ranks have left, now that all have ended."""
        if self._is_on and self._link is not None:
            self._try(self._tell_end)

    def _tell_end(self) -> None:
        scene = self._camera.take_end()
        stopped = tuple(sorted(self._stopped))
        told = NodeScene(
            scene=scene, signs=(), question=0, is_last=True, stopped=stopped, ailments=self._own_ailments
        )  # fmt: skip
        if self._answers is not None:
            self._answers.stop()
        if self._link is not None:
            self._link.publish(pack(told, most_ops=count_ops(scene.world_size)))

    def watch_on(self) -> None:
        """Go on looking while our ranks have ended and those of other nodes have not.

        Raises:
            HungMeanwhile: Those hang.
        """
        self.poll()
        if self.has_hung:
            raise HungMeanwhile

    def add_hang(self, case: Case) -> Case:
        """Return the case of ranks that have ended well in a job that hangs elsewhere."""
        scene = join(case.scene, [self._seen]) if self._all and case.scene and self._seen else case.scene
        scene = with_sources(scene) if scene is not None else None
        return replace(case, hung=True, decided=self.decided or (), sights=self.sights, scene=scene)

    def add_leavers(self, case: Case) -> Case:
        """See, when ours have lost a peer, whether it was one of another node that left with exit code 0: then no rank has failed.

        Args:
            case: Of our own ranks.

        Returns:
            The case with what all nodes have come to; as it is if a rank elsewhere has failed, or it is not known.
        """
        if self._link is None:
            return case
        if self._is_on and not self._link.lost_nodes:
            case = self._try(lambda: self._find_leavers(case)) or case
        return replace(case, lost_nodes=self._link.lost_nodes, given_up=self._link.given_up)

    def _find_leavers(self, case: Case) -> Case:
        link = self._link
        if link is None:
            return case
        everyone = self._all or AllNodes(self._camera, link, self._say, self._clock)
        end, ends = self._clock.monotonic() + _LEAVE_S, everyone.list_ends()
        while link.decision is None and ends is None and not link.lost_nodes:
            if self._clock.monotonic() > end or not link.collect():
                self._ailments_elsewhere = everyone.list_ailments()
                return case
            everyone.read_all(_LAST_READING_S)
            ends = everyone.list_ends()
            self._clock.sleep(_SOON_S)
        self._ailments_elsewhere = everyone.list_ailments()
        told = link.decision
        if told is None and ends and case.scene is not None:
            scene = join(self._camera.take_end(), (one.scene for one in ends))
            stopped = {rank for one in ends for rank in one.stopped} | self._stopped
            sight = find_leavers(scene, stopped)
            told = None if sight is None else link.decide(write_sights(self._name_hosts((sight,))))
        if told is None:
            return case
        self._adopt(link, told)
        return self.add_hang(case)

    def add_mispairings(self, case: Case) -> Case:
        """Compare, when the whole job is through, what ranks of different nodes have done: return the case with what is found.

        Args:
            case: Of our own ranks.
        """
        if not self._is_on or self._link is None or case.scene is None:
            return case
        return self._try(lambda: self._compare(case)) or case

    def _compare(self, case: Case) -> Case:
        link, everyone, own = self._link, self._all, case.scene
        if link is None or own is None:
            return case
        if everyone is None:
            sights = read_sights(link.wait_word())
        else:
            link.collect()
            everyone.read_all(_LAST_READING_S)
            own = with_sources(everyone.with_others(own))
            sights = self._name_hosts(tuple(sight for sight in look(own) if sight.kind == "mismatch"))
            link.say_word(write_sights(sights))
        link.wait_heard()
        return replace(case, decided=sights, scene=own) if sights else case

    def _look(self, scene: Scene) -> tuple[Sight, ...]:
        """Judge by the text of the script too: whether a line stands under a rank test, or in a finally."""
        self._seen = scene
        own = {rank.rank for rank in self._ranks}
        self._children.look(replace(scene, ranks=tuple(facts for facts in scene.ranks if facts.rank in own)))
        self._current = self._name_hosts(look(with_sources(scene)))
        return self._current

    def _name_hosts(self, sights: tuple[Sight, ...]) -> tuple[Sight, ...]:
        nodes = [(node.host, node.ranks) for node in self._link.nodes.values()] if self._link else []
        return tuple(with_hosts(sight, nodes) for sight in sights)

    def _try(self, action: Callable[[], _Result]) -> _Result | None:
        """Do something; a fault in the watch ends the watch, and never the job."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever a rule may stumble over
            self._is_on = False
            self._say(f"rankwise: the watch for hangs has failed and is off; the job continues: {error!r}")
            return None


def _order(sights: tuple[Sight, ...]) -> tuple[Sight, ...]:
    """Return what is seen, and then what was proved before, each once, and the cause first: collectives that do not correspond."""
    once: dict[str, Sight] = {}
    for sight in sights:
        once.setdefault(sight.key, sight)
    return tuple(sorted(once.values(), key=lambda sight: sight.kind != "mismatch" or sight.is_drift))


@final
class _Notes:
    """Says on the terminal what is seen, and keeps what it was seen in."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        # A function's caller removes the folder, and with --log-dir /dev/null nobody wants one.
        self._folder = folder if job.serial is None and not job.spec.logs.is_off else None
        self._asking: threading.Thread | None = None

    def finish(self, wait_s: float) -> None:
        """Let what is being said come before the report."""
        if self._asking is not None:
            self._asking.join(wait_s)

    def tell(self, sight: Sight, scene: Scene, *, waited_s: float) -> None:
        """Say it in a line; of a rank that waits for its data loader once it is known where the workers are."""
        self._job.events.write(
            "hang.seen", rule=sight.rule, certainty=sight.certainty, culprits=sight.culprits, message=sight.message,
            waited_s=round(waited_s, 1),
        )  # fmt: skip
        # To ask the workers takes a moment, which the loop that watches does not have; those of other hosts are not seen here.
        if sight.doing == "loading data" and self._job.spec.is_one_node:
            self._asking = threading.Thread(
                target=self._tell_places, args=(sight, scene), name="rankwise-places", daemon=True
            )
            self._asking.start()
        else:
            self._say(sight, scene)

    def _tell_places(self, sight: Sight, scene: Scene) -> None:
        seen = with_places(scene)
        placed = next((one for one in look(with_sources(seen)) if one.key == sight.key), sight)
        self._say(placed, seen)

    def _say(self, sight: Sight, scene: Scene) -> None:
        text = f"rankwise: {name_roles(render_sight(sight, now_s=scene.now_s), self._job.spec.roles)}"
        if sight.is_proof and self._folder is not None:
            try:
                evidence_folder.save(self._folder, scene=with_sources(scene))
                text += f"\n  -> evidence: {self._folder}"
            except OSError as error:
                text += f"\n  (the evidence can't be written to {self._folder}: {error.strerror})"
        self._job.console.say(text)
