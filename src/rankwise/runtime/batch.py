"""The arithmetic of batch sizes: what one optimizer step sees over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.base.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a global batch is split.

    Attributes:
        global_size: Samples that one optimizer step sees, over all ranks.
        world_size: How many ranks share it.
        micro_size: Samples that one forward pass of a rank sees, at most.
        accumulation: Forward passes of a rank in one optimizer step.
        sizes: Samples of each rank in one step, by rank; they differ by one at most.
    """

    global_size: int
    world_size: int
    micro_size: int
    accumulation: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        spread = "" if len(set(self.sizes)) == 1 else f" (ranks hold {max(self.sizes)} or {min(self.sizes)})"
        return f"global batch {self.global_size} = {self.world_size} ranks x {self.accumulation} passes x {self.micro_size} samples at most{spread}"


def plan_batch(
    world_size: int,
    *,
    global_size: int | None = None,
    per_rank: int | None = None,
    micro_size: int | None = None,
) -> BatchPlan:
    """Work out what is not given from what is.

    Args:
        world_size: How many ranks.
        global_size: Samples of one optimizer step over all ranks; keep it when the number of ranks changes.
        per_rank: Or: samples of one optimizer step on each rank.
        micro_size: Samples that fit into one forward pass; None: all of a rank's.

    Returns:
        The plan; ``print`` it.

    Raises:
        UsageError: Both or none of ``global_size`` and ``per_rank`` are given, or a number is below what can be.
    """
    if (global_size is None) == (per_rank is None):
        raise UsageError(f"global_size={global_size} and per_rank={per_rank}", hint="give exactly one of them")
    total = per_rank * world_size if global_size is None and per_rank is not None else int(global_size or 0)
    if total < world_size:
        raise UsageError(
            f"a global batch of {total} for {world_size} ranks: some rank would have no samples",
            hint="use a larger batch, or fewer ranks",
        )
    if micro_size is not None and micro_size < 1:
        raise UsageError(
            f"micro_size={micro_size}: a forward pass takes at least one sample",
            hint="leave it out, or pass 1 or more",
        )
    base, extra = divmod(total, world_size)
    sizes = tuple(base + (rank < extra) for rank in range(world_size))
    accumulation = -(-max(sizes) // micro_size) if micro_size else 1
    return BatchPlan(
        global_size=total,
        world_size=world_size,
        micro_size=-(-max(sizes) // accumulation),
        accumulation=accumulation,
        sizes=sizes,
    )
