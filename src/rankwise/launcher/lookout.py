"""Where an attempt is watched from: the camera, the watch and who is told, until the last scene before the ranks are stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, final

from rankwise.evidence.source import with_sources
from rankwise.launcher.camera import Camera
from rankwise.launcher.hang_watch import Bounds, HangWatch
from rankwise.launcher.own_children import OwnChildren
from rankwise.verdict import evidence_folder
from rankwise.verdict.look import look
from rankwise.verdict.report import render_sight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rankwise.evidence.facts import Scene
    from rankwise.launcher.job import Job
    from rankwise.launcher.rank_end import Rank
    from rankwise.launcher.rendezvous.assignment import Assignment
    from rankwise.verdict.sight import Sight

_Result = TypeVar("_Result")
#: How long answers are waited for before the ranks are stopped: a restart must not wait for them, the last report may.
_LAST_ANSWER_S, _ANSWER_S = 0.5, 0.1


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
    """

    def __init__(self, job: Job, part: Assignment, ranks: Sequence[Rank], folder: Path) -> None:
        self._is_on = job.spec.watch
        self._ranks, self._say = ranks, job.console.say
        self._camera = Camera(ranks, part.world_size, job.clock)
        bounds = Bounds(timeout_s=job.spec.hang_timeout_s, on_hang=job.spec.on_hang)
        self._children = OwnChildren(self._say)
        self._watch = HangWatch(self._camera, self._look, _Notes(job, folder / "evidence"), bounds, job.clock)
        self.scene: Scene | None = None

    @property
    def next_in_s(self) -> float:
        """Return after how many seconds it wants to be polled."""
        return self._watch.next_in_s if self._is_on else float("inf")

    @property
    def has_hung(self) -> bool:
        """Whether the attempt is to end because its ranks hang."""
        return self._watch.has_decided

    @property
    def is_left_behind(self) -> bool:
        """Whether they hang, and others had left by themselves without an error."""
        return self.has_hung and any(rank.code == 0 and rank.stopped_s is None for rank in self._ranks)

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What was proved while the ranks ran."""
        return self._watch.sights

    def poll(self) -> None:
        """Look, if it is time to."""
        if not self._is_on:
            return
        has_ended = not all(rank.is_alive for rank in self._ranks)
        self._try(lambda: self._watch.poll(has_ended=has_ended))

    def take_last(self, *, is_final: bool) -> None:
        """Look at all ranks before they are stopped: what the living wait for is half of the answer.

        Args:
            is_final: Whether nobody waits for a restart.
        """
        wait_s = _LAST_ANSWER_S if is_final else _ANSWER_S
        is_watched = self._is_on
        if (scene := self._try(lambda: self._camera.take_last(wait_s=wait_s))) is not None and is_watched:
            self.scene = with_sources(scene)

    def take_end(self) -> None:
        """Look at what ranks that have all ended by themselves have left: wrong pairs show only there if they came late."""
        if self._is_on:
            self.scene = self._try(self._camera.take_end)

    def _look(self, scene: Scene) -> tuple[Sight, ...]:
        """Judge by the text of the script too: whether a line stands under a rank test, or in a finally."""
        self._children.look(scene)
        return look(with_sources(scene))

    def _try(self, action: Callable[[], _Result]) -> _Result | None:
        """Do something; a fault in the watch ends the watch, and never the job."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever a rule may stumble over
            self._is_on = False
            self._say(f"rankwise: the watch for hangs has failed and is off; the job goes on: {error!r}")
            return None


@final
class _Notes:
    """Says on the terminal what is seen, and keeps what it was seen in."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        # A function's caller removes the folder, and with --log-dir /dev/null nobody wants one.
        self._folder = folder if job.serial is None and not job.spec.logs.is_off else None

    def tell(self, sight: Sight, scene: Scene, *, waited_s: float) -> None:
        """Say it in a line."""
        self._job.events.write(
            "hang.seen", rule=sight.rule, certainty=sight.certainty, culprits=sight.culprits, message=sight.message,
            waited_s=round(waited_s, 1),
        )  # fmt: skip
        text = f"rankwise: {render_sight(sight, now_s=scene.now_s)}"
        if sight.is_proof and self._folder is not None:
            try:
                evidence_folder.save(self._folder, scene=with_sources(scene))
                text += f"\n  -> evidence: {self._folder}"
            except OSError as error:
                text += f"\n  (the evidence can't be written to {self._folder}: {error.strerror})"
        self._job.console.say(text)
