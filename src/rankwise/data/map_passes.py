"""A pass over a data set with an index: draws work items from the sampler, and makes steps of what comes back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.errors import UsageError
from rankwise.data.map_reader import MapWorkItem
from rankwise.data.sample_position import deal_places, show
from rankwise.data.steps import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.data.batches import WorkerBatch
    from rankwise.data.peers import Peers
    from rankwise.data.pipeline import Pipeline
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
        for number in range(sampler.schedule.count_steps(consumed)):
            plan = sampler.schedule.plan(number, consumed)
            own, total, made, kept = plan.num_samples, plan.global_samples, worker_batches, None
            if self._drops_none:  # all of it is taken, to know what is left of its samples
                taken = [next(worker_batches) for _ in plan.micro_sizes]
                own, made, kept = (
                    sum(sum(one.counts) for one in taken),
                    iter(taken),
                    [one.kept for one in taken],
                )
                total = sum(self._peers.tell(own))
            reached = plan.start + plan.global_samples
            if total == 0:
                self._count(plan, epoch, is_last=True)
                continue
            step = Step(
                self._hand_out(made, plan, epoch, kept),
                index=plan.index,
                num_micro_batches=len(plan.micro_sizes),
                num_samples=own,
                global_samples=total,
                world_size=self._peers.world_size,
            )
            yield step
            step.drain()
        for _ in worker_batches:  # asked once more, torch's loader ends its workers
            pass
        if (sampler.epoch, sampler.consumed) == (epoch, reached):
            sampler.end_pass()

    def _hand_out(
        self, made: Iterator[WorkerBatch], plan: StepPlan, epoch: int, kept: Sequence[Any] | None
    ) -> Iterator[Any]:
        """Yield the micro-batches of a step, each taken when it is asked for."""
        peers, last = self._peers, len(plan.micro_sizes)
        places = deal_places(epoch, plan.start + peers.rank, peers.world_size, plan.micro_sizes, kept)
        for number, place in enumerate(places, 1):
            batches = next(made).batches
            self._count(plan, epoch, is_last=number == last)
            show(place)
            yield batches[0]

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
