"""A pass over a data set with an index: draws work items from the sampler, and makes steps of what comes back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import UsageError
from rankwise.data.map_reader import MapWorkItem
from rankwise.data.place import deal_places, show
from rankwise.data.steps import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.data.batches import WorkerBatch
    from rankwise.data.peers import Peers
    from rankwise.data.pipeline import Pipeline
    from rankwise.data.place import Place
    from rankwise.data.sampler import GlobalBatchSampler
    from rankwise.data.schedule import StepPlan


@final
class MapPasses:
    """The passes of one loader.

    Args:
        sampler: Which sample is where, and the cursor.
        pipeline: What loads.
        peers: The ranks.
        drops_none: Samples may be None, and are left out.
        draws_twice: A sample may come twice in an epoch.
    """

    def __init__(
        self,
        sampler: GlobalBatchSampler,
        pipeline: Pipeline,
        peers: Peers,
        *,
        drops_none: bool,
        draws_twice: bool,
    ) -> None:
        self._sampler, self._pipeline, self._peers = sampler, pipeline, peers
        self._drops_none, self._draws_twice = drops_none, draws_twice
        # The words of a cursor.
        self.set_epoch, self.end_pass = sampler.set_epoch, sampler.end_pass
        self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict

    @property
    def epoch(self) -> int:
        """The epoch of the cursor."""
        return self._sampler.epoch

    def count_batches(self) -> int | None:
        """Return how many micro-batches a whole epoch has."""
        return len(self._sampler)

    def steps(self) -> Iterator[Step]:
        """Begin a pass and yield its steps; it goes on with what one that was left early has not delivered."""
        sampler = self._sampler
        epoch, consumed = sampler.begin_pass()
        self._peers.agree({
            "num_samples": sampler.num_samples, "seed": sampler.seed, "global_batch": sampler.global_batch,
            "micro_batch": sampler.micro_batch, "order": sampler.order.name, "drop_last": sampler.drop_last,
            "drop_none": self._drops_none, "epoch": epoch, "consumed": consumed,
        })  # fmt: skip
        work_items = partial(draw_work_items, sampler, epoch, consumed, draws_twice=self._draws_twice)
        worker_batches = self._pipeline.start(work_items, epoch)
        reached = consumed
        for number in range(sampler.count_steps(consumed)):
            plan = sampler.plan(number, consumed=consumed)
            step = (
                self._fill(worker_batches, plan, epoch)
                if self._drops_none
                else self._pass_on(worker_batches, plan, epoch)
            )
            reached = plan.start + plan.global_samples
            if step is not None:
                yield step
                step.drain()
        for _ in worker_batches:  # asked once more, torch's loader ends its workers
            pass
        if (sampler.epoch, sampler.consumed) == (epoch, reached):
            sampler.end_pass()

    def _pass_on(self, worker_batches: Iterator[WorkerBatch], plan: StepPlan, epoch: int) -> Step:
        """Return a step whose micro-batches are taken when they are asked for."""

        def take() -> Iterator[Any]:
            last = len(plan.micro_sizes)
            for number, place in enumerate(self._deal_places(plan, epoch), 1):
                batch_of_worker = next(worker_batches)
                self._count(plan, epoch, is_last=number == last)
                show(place)
                yield batch_of_worker.batches[0]

        return self._make(take(), plan, plan.num_samples, plan.global_samples)

    def _fill(self, worker_batches: Iterator[WorkerBatch], plan: StepPlan, epoch: int) -> Step | None:
        """Return a step with all that is left of its samples; None if no rank has any."""
        taken = [next(worker_batches) for _ in plan.micro_sizes]
        own = sum(sum(batch_of_worker.counts) for batch_of_worker in taken)
        kept = [batch_of_worker.kept for batch_of_worker in taken]
        total = sum(self._peers.tell(own))
        if total == 0:
            self._count(plan, epoch, is_last=True)
            return None

        def hand_out() -> Iterator[Any]:
            last, places = len(taken), self._deal_places(plan, epoch, kept)
            for number, (batch_of_worker, place) in enumerate(zip(taken, places, strict=True), 1):
                self._count(plan, epoch, is_last=number == last)
                show(place)
                yield batch_of_worker.batches[0]

        return self._make(hand_out(), plan, own, total)

    def _deal_places(
        self, plan: StepPlan, epoch: int, kept: Sequence[Sequence[int] | None] | None = None
    ) -> list[Place]:
        """Return the place of each micro-batch."""
        peers = self._peers
        return deal_places(epoch, plan.start + peers.rank, peers.world_size, plan.micro_sizes, kept)

    def _make(self, micro_batches: Iterator[Any], plan: StepPlan, own: int, total: int) -> Step:
        return Step(
            micro_batches,
            index=plan.index,
            num_micro_batches=len(plan.micro_sizes),
            num_samples=own,
            global_samples=total,
            world_size=self._peers.world_size,
        )

    def _count(self, plan: StepPlan, epoch: int, *, is_last: bool) -> None:
        sampler = self._sampler
        if (sampler.epoch, sampler.consumed) != (epoch, plan.start):
            raise UsageError(
                f"this loop is at sample {plan.start} of epoch {epoch}, and the loader has been moved to sample {sampler.consumed} of epoch {sampler.epoch}",
                rank=self._peers.rank,
                hint="one loop at a time: leave it before set_epoch(), load_state_dict() or another loop over this loader",
            )
        if is_last:
            sampler.advance(plan.global_samples)


def draw_work_items(
    sampler: GlobalBatchSampler, epoch: int, consumed: int, *, draws_twice: bool
) -> Iterator[MapWorkItem]:
    """Yield a work item for each micro-batch of this rank.

    Args:
        sampler: Which sample is where.
        epoch: Of which epoch.
        consumed: Samples of it to leave out, over all ranks.
        draws_twice: A sample may come twice in an epoch.

    Yields:
        What to read, in order.
    """
    for plan, micro_batches in sampler.draw_steps(epoch, consumed):
        places = iter(range(plan.start + sampler.rank, sampler.num_samples, sampler.num_replicas))
        other = None
        if not all(micro_batches):
            other = int(sampler.order.take(epoch, torch.tensor([plan.start], device="cpu"))[0])
        for indices in micro_batches:
            where = tuple(next(places) for _ in indices) if draws_twice else None
            yield MapWorkItem(epoch=epoch, indices=indices, places=where, other=other)
