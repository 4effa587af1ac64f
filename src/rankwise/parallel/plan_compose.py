"""The ways to spread a training over the ranks, from the least communication to the most, and what each needs of memory.

A stage of a pipeline, and a device of a placed model, holds consecutive blocks. A stage keeps what its micro-batches in flight have saved: under
1F1B (Narayanan et al., arXiv:2006.09503) stage s of p has p - s of them, under GPipe (Huang et al., arXiv:1811.06965) all. And torch's schedules
make room beforehand for what each micro-batch of a step receives, forward and backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, final

from rankwise.parallel.memory import Memory
from rankwise.parallel.partition import balance
from rankwise.parallel.pipeline_layout import list_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwise.parallel.plan_measure import Facts, Row, Weight
    from rankwise.parallel.plan_trace import Activations


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a training is spread over, as given to ``plan``; ``limit`` is what a rank may hold, in bytes."""

    num_ranks: int
    ranks_per_node: int
    limit: int | None
    schedule: str
    microbatches: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """One way to spread a training over the ranks, and what it needs; ``Plan`` says what the attributes are."""

    name: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    devices: int = 1
    schedule: str | None = None
    microbatches: int | None = None
    parts: tuple[Memory, ...] = ()
    shards_optimizer: bool = False
    checkpointing: bool = False
    precision: str = ""
    memory: Memory = field(default_factory=Memory)
    fits: bool | None = None

    def __str__(self) -> str:
        return self.name + (" + checkpointing" if self.checkpointing else "")


# ------------------------------------------------------------ which there are


def compose(facts: Mapping[str, Facts], job: Job) -> Iterator[Composition]:
    """Yield all compositions, from the least communication to the most, then those in which ranks wait; fp32 weights before bf16 ones."""
    for precision, held in facts.items():
        ways = [False, True] if held.replicated is not None and held.blocks else [False]
        for one in _list_all(held, job, ways):
            memory = max(one.parts, key=lambda part: part.total) if one.parts else _count(held, one)
            fits = None if job.limit is None else memory.total <= job.limit
            yield replace(one, precision=precision, memory=memory, fits=fits)


def _list_all(held: Facts, job: Job, ways: Sequence[bool]) -> Iterator[Composition]:
    for checkpointing in ways:
        for one in _list_data_axes(job):
            yield replace(one, checkpointing=checkpointing)
    for tensor in _list_tensor_degrees(held, job):
        shard = job.num_ranks // tensor
        name = f"TP {tensor} x FSDP {shard}" if shard > 1 else f"TP {tensor}"
        for checkpointing in ways:
            yield Composition(name=name, shard=shard, tensor=tensor, checkpointing=checkpointing)
    row = held.row
    if row is not None and job.num_ranks > 1 and (row.is_traced or held.replicated is None):
        for checkpointing in ways:
            yield from _list_pipelines(held, row, job, checkpointing=checkpointing)
            if job.num_ranks <= min(job.ranks_per_node, len(row.blocks)):
                yield _place(held, row, job.num_ranks, checkpointing=checkpointing)


def _list_data_axes(job: Job) -> Iterator[Composition]:
    num_ranks, per_node = job.num_ranks, job.ranks_per_node
    if num_ranks == 1:
        yield Composition(name="one rank")
        return
    yield Composition(name="DDP", replicate=num_ranks)
    yield Composition(name="ZeRO-1", replicate=num_ranks, shards_optimizer=True)
    if num_ranks > per_node > 1 and num_ranks % per_node == 0:
        nodes = num_ranks // per_node
        yield Composition(name=f"HSDP {nodes} x {per_node}", replicate=nodes, shard=per_node)
    yield Composition(name="FSDP", shard=num_ranks)


def _list_tensor_degrees(held: Facts, job: Job) -> list[int]:
    shared = (job.num_ranks, job.ranks_per_node, held.tensor_degrees)
    found = [2**power for power in range(1, 10)]
    return [one for one in found if one <= min(shared) and not any(number % one for number in shared)]


def _list_degrees(row: Row, num_ranks: int) -> list[int]:
    """Return into how many stages a model may be cut on so many ranks: powers of two that divide them, and all of them."""
    powers = [2**power for power in range(1, num_ranks.bit_length())]
    found = [one for one in dict.fromkeys([*powers, num_ranks]) if one > 1 and num_ranks % one == 0]
    return [one for one in found if one <= len(row.blocks)]


def _list_pipelines(held: Facts, row: Row, job: Job, *, checkpointing: bool) -> Iterator[Composition]:
    schedule = job.schedule
    for pipeline in _list_degrees(row, job.num_ranks):
        microbatches = 2 * pipeline if job.microbatches is None else job.microbatches
        if schedule != "gpipe" and microbatches < pipeline:
            continue  # 1F1B takes no fewer
        stages = _make_parts(row, list_bounds(row.blocks, pipeline, None))
        beside = job.num_ranks // pipeline
        for replicate, shard, name in ((beside, 1, "DDP"), (1, beside, "FSDP"))[: 1 + (beside > 1)]:
            text = (
                f"PP {pipeline}{f' x {name} {beside}' if beside > 1 else ''} ({schedule}, {microbatches} micro-batches)"
            )
            made = Composition(
                name=text, replicate=replicate, shard=shard, pipeline=pipeline, schedule=schedule, microbatches=microbatches, checkpointing=checkpointing
            )  # fmt: skip
            parts = []
            for number, stage in enumerate(stages):
                in_flight = min(microbatches, pipeline - number) if schedule == "1f1b" else microbatches
                parts.append(_count_part(held, row, stage, in_flight, made))
            yield replace(made, parts=tuple(parts))


def _place(held: Facts, row: Row, devices: int, *, checkpointing: bool) -> Composition:
    """Return one process with several devices, cut as ``place(model, "balanced")`` does: equal bytes on each."""
    sizes = {
        one.name: int(math.prod(one.shape) * (one.itemsize + (one.itemsize + one.states_itemsize) * one.is_trained))
        for one in held.weights
    }
    of_block = [0] * len(row.blocks)
    for name, stages in row.deal(range(len(of_block) + 1)).holders.items():
        of_block[stages[0]] += sizes.get(name, 0)  # of a tied one, one name counts
    found = _make_parts(row, [*balance(of_block, devices), len(of_block)])
    name = f"one process, placed over {devices}"
    made = Composition(name=name, devices=devices, checkpointing=checkpointing)
    return replace(made, parts=tuple(_count_part(held, row, part, 1, made) for part in found))


# ------------------------------------------------------------ consecutive blocks


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
            anew = max((size - kept.inputs_inside[one] for one, size in zip(calls, sizes, strict=True)), default=0)
            return num_in_flight * (outside + sum(kept.received[one] for one in calls)) + anew
        # What was received is kept under its own address, and was counted with the block that saved it.
        received = 0 if self.is_first else kept.received[self.begin] - kept.inputs_inside[self.begin]
        sent = 0 if self.is_last else kept.received[self.end]
        return num_in_flight * (outside + sum(sizes) + received + sent)

    def count_buffers(self, kept: Activations, num_micro_batches: int) -> int:
        """Return the bytes of the room that a schedule makes for what it receives, and of the last stage's outputs, which it keeps."""
        received = 0 if self.is_first else kept.received[self.begin]
        return num_micro_batches * (received + (kept.output if self.is_last else kept.received[self.end]))


def _make_parts(row: Row, bounds: Sequence[int]) -> list[Part]:
    dealt, last = row.deal(bounds), len(bounds) - 2
    return [
        Part(
            begin=begin, end=end, is_first=stage == 0, is_last=stage == last,
            weights=frozenset(name for name, stages in dealt.holders.items() if stage in stages),
        ) for stage, (begin, end) in enumerate(pairwise(bounds))
    ]  # fmt: skip


def _count_part(held: Facts, row: Row, part: Part, num_in_flight: int, made: Composition) -> Memory:
    weights = [one for one in held.weights if one.name in part.weights]
    memory = _sum_up(held, weights, shard=made.shard, tensor=1)
    kept = row.sharded if made.shard > 1 else row.replicated
    beside_copies = memory.gradients if made.replicate > 1 else 0
    communication = _count_gathered(weights, 1) if made.shard > 1 else beside_copies
    if kept is None:
        return replace(memory, communication=communication)
    return replace(
        memory,
        communication=communication + part.count_buffers(kept, made.microbatches or 0),
        activations=part.count_saved(kept, num_in_flight, checkpointing=made.checkpointing) + kept.largest,
    )


# ------------------------------------------------------------ the whole model on each rank


def _count(held: Facts, made: Composition) -> Memory:
    shard, tensor = made.shard, made.tensor
    # With TP, `fully_shard` keeps the weights and gathers them, also on a mesh of one.
    is_sharded = shard > 1 or tensor > 1
    memory = _sum_up(held, held.weights, shard=shard, tensor=tensor)
    saved = held.sharded if is_sharded else held.replicated
    whole = [(one, _count_own(one, shard, tensor)) for one in held.weights if one.is_trained]
    optimizer, communication = memory.optimizer, 0
    if made.shards_optimizer:
        optimizer = _largest_share([(count, _count_states(one, count)) for one, count in whole], made.replicate)
    if is_sharded:
        communication = _count_gathered(held.weights, tensor)
    elif made.replicate > 1:
        communication = max((count * one.itemsize for one, count in whole), default=0)
    activations = saved and saved.saved(tensor=tensor, checkpointing=made.checkpointing) + saved.largest
    return replace(memory, optimizer=optimizer, communication=communication, activations=activations)


def _sum_up(held: Facts, weights: Sequence[Weight], *, shard: int, tensor: int) -> Memory:
    """Return what some weights need on the rank that holds most of them."""
    own = [(one, _count_own(one, shard, tensor)) for one in weights]
    trained = [(one, count) for one, count in own if one.is_trained]
    return Memory(
        parameters=sum(count * one.itemsize for one, count in own), buffers=held.buffers,
        gradients=sum(count * one.itemsize for one, count in trained), optimizer=sum(_count_states(*pair) for pair in trained),
    )  # fmt: skip


def _count_states(weight: Weight, count: int) -> int:
    return int(count * weight.states_itemsize) + weight.states_bytes


def _count_own(weight: Weight, shard: int, tensor: int) -> int:
    """Return the elements of a parameter on the rank that holds most: FSDP2 cuts dim 0, and fills up the last parts."""
    shape = _split(weight, tensor)
    return -(-shape[0] // shard) * math.prod(shape[1:]) if shape else 1


def _split(weight: Weight, tensor: int) -> list[int]:
    return [-(-size // tensor) if dim == weight.tensor_dim else size for dim, size in enumerate(weight.shape)]


def _count_gathered(weights: Sequence[Weight], tensor: int) -> int:
    """Return what FSDP2 holds beside the shards, when it holds most.

    The parameters outside of blocks stay gathered from forward to backward, as ``fully_shard`` does with the root, and
    so do their gradients until the end. That is all of it in the backward of the largest blocks, or at the end, when
    gradients of the root are copied, in the dtype of the shards, into the buffer that is scattered, as those of a block
    are before.
    """
    root, copied, blocks, scattered = 0, 0, dict[int, int](), dict[int, int]()
    for one in weights:
        count = math.prod(_split(one, tensor))
        grown, copy = (count * one.compute_itemsize, count * one.itemsize) if one.is_trained else (0, 0)
        if one.block is None:
            root += count * one.compute_itemsize + grown
            copied += copy
            continue
        blocks[one.block] = blocks.get(one.block, 0) + count * one.compute_itemsize
        scattered[one.block] = scattered.get(one.block, 0) + grown + copy
    sizes = list(blocks.values())
    pair = max((sum(sizes[number : number + 2]) for number in range(len(sizes))), default=0)
    return root + max(pair + max(scattered.values(), default=0), copied)


def _largest_share(states: Sequence[tuple[int, int]], num_ranks: int) -> int:
    """Return the states of the rank with most, as ``ZeroRedundancyOptimizer`` deals out whole parameters: the largest first."""
    counts, shares = [0] * num_ranks, [0] * num_ranks
    for count, size in sorted(states, key=lambda one: one[0], reverse=True):
        rank = counts.index(min(counts))
        counts[rank] += count
        shares[rank] += size
    return max(shares)
