"""A pass over a data set that can only be iterated: nobody knows its end before, so the ranks agree at each step."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import DataError, UsageError
from rankwise.data.prefetch import move_tree
from rankwise.data.sample_position import deal_places, show
from rankwise.data.schedule import Schedule, count_micro_batches
from rankwise.data.splitting import is_one_shot
from rankwise.data.steps import Step
from rankwise.data.stream_reader import Opening, StreamWorkItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.data.batches import WorkerBatch
    from rankwise.data.peers import Peers
    from rankwise.data.pipeline import Pipeline
    from rankwise.data.stream_cursor import StreamCursor
    from rankwise.data.stream_reader import Dealing


@final
class StreamPasses:
    """The passes of one loader.

    Args:
        cursor: Where the job stands.
        dealing: How the elements are dealt out.
        pipeline: What loads.
        peers: The ranks.
        dataset: The user's; nothing is read from it here.
    """

    def __init__(self, cursor: StreamCursor, dealing: Dealing, pipeline: Pipeline, peers: Peers, dataset: Any) -> None:
        self._cursor, self._dealing, self._pipeline, self._peers = cursor, dealing, pipeline, peers
        self._dataset, self._number = dataset, 0
        self._empty: Any = None

    def count_batches(self) -> int | None:
        """Return how many micro-batches a whole epoch has; None if not known."""
        dealing = self._dealing
        if dealing.split != "stride" or not hasattr(self._dataset, "__len__"):
            return None
        return Schedule(
            num_samples=len(self._dataset), global_batch=dealing.global_batch, micro_batch=dealing.micro_batch,
            drop_last=dealing.drops_last, num_replicas=dealing.world_size, rank=dealing.rank,
        ).count_micro_batches()  # fmt: skip

    def steps(self) -> Iterator[Step]:
        """Begin a pass and yield its steps; it goes on with what one that was left early has not delivered."""
        is_rest, has_steps = self._cursor.is_under_way, False
        for step in self._pass_once():
            has_steps = True
            yield step
        if is_rest and not has_steps:
            # Only now it is known that the pass before had delivered all: this one is the next epoch's.
            yield from self._pass_once()

    def _pass_once(self) -> Iterator[Step]:
        cursor = self._cursor
        self._number += 1
        if self._number > 1 and is_one_shot(self._dataset):
            raise self._peers.error(
                "the data set is a one-shot iterator, and has been read",
                "pass a data set whose __iter__ starts again each time",
            )
        dealing, place, number, epoch = self._dealing, cursor.place, self._number, cursor.epoch
        start = place.consumed if dealing.split == "stride" else None
        # With streams of their own, ranks have the same steps and other numbers of samples.
        own = {"num_steps": place.num_steps, **({} if start is None else {"consumed": start})}
        facts = {name: value for name, value in asdict(dealing).items() if name != "rank"}
        self._peers.agree({**facts, "epoch": epoch, **own})
        work_items = partial(
            draw_work_items,
            dealing,
            list(place.openings),
            number=number,
            epoch=epoch,
            turn=place.turn,
            start=start,
        )
        worker_batches = self._pipeline.start(work_items, epoch)
        for step in self._stride(worker_batches) if start is not None else self._shard(worker_batches):
            yield step
            step.drain()
        if (self._number, cursor.epoch) == (number, epoch):
            cursor.end_pass()

    # ------------------------------------------------------------------------ one stream for all

    def _stride(self, worker_batches: Iterator[WorkerBatch]) -> Iterator[Step]:
        for made in worker_batches:
            place = self._cursor.place
            own = [made.global_samples, made.is_last, made.num_read]
            answers = self._peers.tell(own)
            if any(one != answers[0] for one in answers):
                raise self._tell_difference(answers)
            opening = Opening(num_read=made.num_read, state=made.state)
            openings = dict.fromkeys(range(self._dealing.num_shards), opening)
            advance = partial(self._cursor.advance, made.num_read - place.consumed, openings, 0)
            if made.global_samples:
                yield self._make(made, list(made.batches), made.global_samples, advance)
            elif made.num_read > place.consumed and not made.is_last:  # all of them were None
                advance()
            if made.is_last:
                return

    def _tell_difference(self, answers: list[Any]) -> DataError:
        shown = "; ".join(
            f"rank {rank} has {samples} samples at element {place}{', and its stream has ended' if ended else ''}"
            for rank, (samples, ended, place) in enumerate(answers)
        )
        return self._peers.error(
            f"the ranks don't read the same stream: {shown}",
            "with split='stride' every rank must read the same elements in the same order: look for files that differ between hosts,"
            " or a data set that splits itself (split='dataset')",
        )

    # ------------------------------------------------------------------ a stream for each worker

    def _shard(self, worker_batches: Iterator[WorkerBatch]) -> Iterator[Step]:
        cursor, peers, num_shards = self._cursor, self._peers, self._dealing.num_shards
        ended: set[int] = set()
        turn = cursor.place.turn
        for _ in range(turn):
            next(worker_batches)
        while True:
            made, openings, num_taken = self._find_samples(worker_batches, ended, turn)
            turn = (turn + num_taken) % num_shards
            own = 0 if made is None else sum(made.counts)
            answers = peers.tell([own, self._empty is not None])
            total = sum(one[0] for one in answers)
            if total == 0:
                return
            if not all(has_empty for _, has_empty in answers):
                first = next(rank for rank, one in enumerate(answers) if one[1])
                given = peers.give(self._empty if first == peers.rank else None, "data loader's empty batch")
                self._empty = given[first]
            yield self._make(made, self._fill(made), total, partial(cursor.advance, own, openings, turn))

    def _find_samples(
        self, worker_batches: Iterator[WorkerBatch], ended: set[int], turn: int
    ) -> tuple[WorkerBatch | None, dict[int, Opening], int]:
        """Take worker batches until one has samples, or all streams of this rank have ended."""
        openings: dict[int, Opening] = {}
        num_taken = 0
        while len(ended) < self._dealing.num_shards:
            made, shard = next(worker_batches), (turn + num_taken) % self._dealing.num_shards
            num_taken += 1
            openings[shard] = Opening(num_read=made.num_read, state=made.state)
            if made.is_last:
                ended.add(shard)
            if self._empty is None:
                self._empty = made.empty
            if any(made.counts):
                return made, openings, num_taken
        return None, openings, num_taken

    def _fill(self, made: WorkerBatch | None) -> list[Any]:
        dealing = self._dealing
        number = count_micro_batches(dealing.global_batch, dealing.world_size, dealing.micro_batch)
        batches = [None] * number if made is None else made.batches
        return [move_tree(self._empty, self._pipeline.device) if one is None else one for one in batches]

    def _make(self, made: WorkerBatch | None, batches: list[Any], total: int, advance: Callable[[], None]) -> Step:
        cursor, dealing, number, epoch = self._cursor, self._dealing, self._number, self._cursor.epoch
        done = cursor.place.num_steps
        counts = [0] * len(batches) if made is None else made.counts
        # One stream for all: what is left of the step's elements is dealt out in turn, so no rank need ask for
        # positions. Streams of their own: each rank counts its own samples, and the ranks' numbers interleave: no two
        # are equal.
        first = cursor.place.consumed * (1 if dealing.split == "stride" else dealing.world_size)
        places = deal_places(epoch, first + dealing.rank, dealing.world_size, counts)

        def hand_out() -> Iterator[Any]:
            for left, batch, place in zip(reversed(range(len(batches))), batches, places, strict=True):
                if (self._number, cursor.epoch, cursor.place.num_steps) != (number, epoch, done):
                    raise UsageError(
                        f"this loop is at step {done} of epoch {epoch}, and the loader has been moved to step {cursor.place.num_steps} of epoch {cursor.epoch}",
                        rank=self._peers.rank,
                        hint="one loop at a time: leave it before set_epoch(), load_state_dict() or another loop over this loader",
                    )
                if left == 0:
                    advance()
                show(place)
                yield batch

        return Step(
            hand_out(),
            index=done,
            num_micro_batches=len(batches),
            num_samples=sum(counts),
            global_samples=total,
            world_size=self._peers.world_size,
        )


def draw_work_items(
    dealing: Dealing, openings: list[Opening], *, number: int, epoch: int, turn: int, start: int | None
) -> Iterator[StreamWorkItem]:
    """Yield work items without end; torch gives them to the workers in turn.

    Args:
        dealing: How the elements are dealt out.
        openings: Where each stream of this rank begins.
        number: Which pass.
        epoch: Of which epoch.
        turn: Which stream comes first.
        start: At which element the first step begins, if there is one stream for all.

    Yields:
        What to read, in order.
    """
    # Each worker keeps its part after a resume: those before the one whose turn it is get a blank.
    for shard in range(turn):
        yield StreamWorkItem(number=number, epoch=epoch, shard=shard, is_blank=True)
    for step in count(turn):
        shard = step % dealing.num_shards
        yield StreamWorkItem(
            number=number,
            epoch=epoch,
            shard=shard,
            start=None if start is None else start + step * dealing.global_batch,
            opening=openings[shard] if step < turn + dealing.num_shards else None,
        )
