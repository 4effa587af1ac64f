"""How an epoch is cut into steps, ranks' shares and micro-batches: arithmetic that needs no sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

from rankwise.base.errors import UsageError

#: Indices are computed in blocks: the first is small, as someone waits for it; later ones make each step cheap, and
#: stay below what torch gives to several threads, which would disturb the training more than they help.
FIRST_BLOCK, LAST_BLOCK = 1 << 10, 3 << 13


@final
@dataclass(slots=True, kw_only=True)  # not frozen: that would take three times as long to make, twice a step
class StepPlan:
    """What one global step holds, known without computing which samples these are.

    Attributes:
        index: Which step of the epoch, from 0.
        start: Samples of the epoch that come before it, over all ranks.
        global_samples: Its samples over all ranks.
        num_samples: Its samples on this rank.
        micro_sizes: Samples of each micro-batch of this rank; as many micro-batches on every rank, some may be empty.
    """

    index: int
    start: int
    global_samples: int
    num_samples: int
    micro_sizes: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of an epoch, for one rank.

    Attributes:
        num_samples: Samples of the epoch.
        global_batch: Samples of one step over all ranks.
        micro_batch: Most samples of one forward pass of a rank; None: all that it has of a step.
        drop_last: Whether the last step is left out if it is not full.
        num_replicas: How many ranks.
        rank: Which of them.
    """

    num_samples: int
    global_batch: int
    micro_batch: int | None
    drop_last: bool
    num_replicas: int
    rank: int

    def count_steps(self, consumed: int = 0) -> int:
        """Return how many steps the epoch still has.

        Args:
            consumed: Samples of it that are done.
        """
        left = self.num_samples - consumed
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def count_micro_batches(self) -> int:
        """Return how many micro-batches a whole epoch has on each rank."""
        num_full, rest = divmod(self.num_samples, self.global_batch)
        steps = [(num_full, self.global_batch), (int(rest > 0 and not self.drop_last), rest)]
        return sum(n * count_micro_batches(size, self.num_replicas, self.micro_batch) for n, size in steps)

    def plan(self, step: int, consumed: int = 0) -> StepPlan:
        """Say what a step holds.

        Args:
            step: Which step, counted from ``consumed``.
            consumed: Where the counting begins, in samples of the epoch.

        Returns:
            The plan.

        Raises:
            UsageError: There is no such step.
        """
        num_steps = self.count_steps(consumed)
        if not 0 <= step < num_steps:
            raise UsageError(
                f"step {step} was asked for, and {num_steps} steps follow the first {consumed} of {self.num_samples} samples",
                rank=self.rank,
                hint="ask for 0 to count_steps(consumed) - 1",
            )
        start = consumed + step * self.global_batch
        global_samples = min(self.global_batch, self.num_samples - start)
        num_samples, micro_sizes = _share(global_samples, self.num_replicas, self.rank, self.micro_batch)
        return StepPlan(
            # After a change of the global batch the counting may begin inside a step: numbers still grow by one.
            index=-(-consumed // self.global_batch) + step,
            start=start,
            global_samples=global_samples,
            num_samples=num_samples,
            micro_sizes=micro_sizes,
        )


def count_micro_batches(global_samples: int, world_size: int, micro_batch: int | None) -> int:
    """Return how many micro-batches each rank has in a step: enough for the rank with the most samples."""
    largest = -(-global_samples // world_size)
    return max(1, -(-largest // micro_batch)) if micro_batch else 1


def divide(number: int, num_parts: int) -> tuple[int, ...]:
    """Return sizes of parts that differ by one at most; the first ones are larger."""
    base, extra = divmod(number, num_parts)
    return (base + 1,) * extra + (base,) * (num_parts - extra)


@lru_cache  # all steps of an epoch but the last are alike
def _share(global_samples: int, num_replicas: int, rank: int, micro_batch: int | None) -> tuple[int, tuple[int, ...]]:
    """Return how many samples of a step a rank has, and how many in each micro-batch."""
    num_samples = len(range(rank, global_samples, num_replicas))
    return num_samples, divide(num_samples, count_micro_batches(global_samples, num_replicas, micro_batch))
