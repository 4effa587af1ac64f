"""What each stage of a pipeline holds, and each device of a placed model: consecutive blocks, and their activations.

A stage keeps what its micro-batches in flight have saved: under 1F1B (Narayanan et al., arXiv:2006.09503) stage s of p has p - s of
them, under GPipe (Huang et al., arXiv:1811.06965) all. And torch's schedules make room beforehand for what each micro-batch of a step
receives, forward and backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rankwise.base.errors import UsageError
from rankwise.parallel.partition import balance
from rankwise.parallel.pipeline_layout import list_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.parallel.pipeline_layout import Deal
    from rankwise.parallel.plan_trace import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The blocks between which a model can be cut, as ``apply_pipeline`` finds them.

    Attributes:
        blocks: Their names.
        deal: Gives each stage its parts, from the bounds of the stages.
        replicated: What autograd keeps of one forward pass, by block; None without a batch. ``sharded``: the same under FSDP.
    """

    blocks: tuple[str, ...]
    deal: Callable[[Sequence[int]], Deal]
    replicated: Activations | None
    sharded: Activations | None

    @property
    def is_traced(self) -> bool:
        """Whether each block was called once, so that it is known what each one keeps."""
        return all(one is not None and len(one.blocks) == len(self.blocks) for one in (self.replicated, self.sharded))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some consecutive blocks, and what belongs to them.

    Attributes:
        begin: Number of the first block; ``end``: of the one behind the last.
        is_first: Whether it has what stands before the blocks; ``is_last``: what stands behind them.
        weights: The names of its parameters.
    """

    begin: int
    end: int
    is_first: bool
    is_last: bool
    weights: frozenset[str]

    def count_saved(self, kept: Activations, num_in_flight: int, *, checkpointing: bool) -> int:
        """Return the bytes that it keeps when the most micro-batches are under way."""
        calls = range(self.begin, self.end)
        outside = kept.before if self.is_first else 0
        outside += kept.outside + kept.outside_split - kept.before if self.is_last else 0
        sizes = [sum(kept.blocks[one]) for one in calls]
        if checkpointing:
            anew = max((size - kept.inputs_inside[one] for one, size in zip(calls, sizes, strict=True)), default=0)  # fmt: skip
            return num_in_flight * (outside + sum(kept.received[one] for one in calls)) + anew
        # What was received is kept under its own address, and was counted with the block that saved it.
        received = 0 if self.is_first else kept.received[self.begin] - kept.inputs_inside[self.begin]
        sent = 0 if self.is_last else kept.received[self.end]
        return num_in_flight * (outside + sum(sizes) + received + sent)

    def count_buffers(self, kept: Activations, num_micro_batches: int) -> int:
        """Return the bytes of the room that a schedule makes for what it receives, and of the last stage's outputs, which it keeps."""
        received = 0 if self.is_first else kept.received[self.begin]
        return num_micro_batches * (received + (kept.output if self.is_last else kept.received[self.end]))


def cut_evenly(row: Row, num_parts: int) -> list[Part]:
    """Return the stages as ``apply_pipeline`` cuts them by default: equally many blocks in each."""
    return _make_parts(row, list_bounds(row.blocks, num_parts, None))


def cut_by_size(row: Row, sizes: dict[str, int], num_parts: int) -> list[Part]:
    """Return the parts as ``place(model, "balanced")`` cuts: equal bytes on each device."""
    held = [0] * len(row.blocks)
    for name, stages in row.deal(range(len(held) + 1)).holders.items():
        held[stages[0]] += sizes.get(name, 0)  # of a tied one, one name counts
    return _make_parts(row, [*balance(held, num_parts), len(held)])


def _make_parts(row: Row, bounds: Sequence[int]) -> list[Part]:
    dealt, last = row.deal(bounds), len(bounds) - 2
    return [
        Part(
            begin=begin, end=end, is_first=stage == 0, is_last=stage == last,
            weights=frozenset(name for name, stages in dealt.holders.items() if stage in stages),
        ) for stage, (begin, end) in enumerate(pairwise(bounds))
    ]  # fmt: skip


def count_in_flight(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Return of how many micro-batches a stage holds activations at once."""
    return min(num_micro_batches, num_stages - stage) if schedule == "1f1b" else num_micro_batches


def list_degrees(row: Row, num_ranks: int) -> list[int]:
    """Return into how many stages a model may be cut on so many ranks: powers of two that divide them, and all of them."""
    powers = [2**power for power in range(1, int(math.log2(max(1, num_ranks))) + 1)]
    found = [one for one in dict.fromkeys([*powers, num_ranks]) if one > 1 and num_ranks % one == 0]
    return [one for one in found if one <= len(row.blocks)]


def check_schedule(schedule: Any, microbatches: Any) -> None:
    """See that the words make sense."""
    if schedule not in {"1f1b", "gpipe"}:
        raise UsageError(f"schedule={schedule!r} can't be planned", hint="'1f1b' or 'gpipe': the others keep no more than gpipe does")  # fmt: skip
    if microbatches is not None and microbatches < 1:
        raise UsageError(f"microbatches={microbatches} is below 1")
