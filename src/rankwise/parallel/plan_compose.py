"""The ways to spread a training over the ranks, from the least communication to the most, and what each needs of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from rankwise.parallel.memory import Memory
from rankwise.parallel.plan_stages import count_in_flight, cut_by_size, cut_evenly, list_degrees

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwise.parallel.plan_measure import Facts, Weight
    from rankwise.parallel.plan_stages import Part


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
    precision: str
    memory: Memory
    fits: bool | None = None

    def __str__(self) -> str:
        return self.name + (" + checkpointing" if self.checkpointing else "")


# ------------------------------------------------------------ which there are


def compose(
    facts: Mapping[str, Facts],
    num_ranks: int,
    ranks_per_node: int,
    limit: int | None,
    schedule: str = "1f1b",
    microbatches: int | None = None,
) -> Iterator[Composition]:
    """Yield all compositions, from the least communication to the most, then those in which ranks wait; fp32 weights before bf16 ones."""
    for precision, held in facts.items():
        ways = [False, True] if held.replicated is not None and held.blocks else [False]
        for checkpointing in ways:
            for name, axes in _list_data_axes(num_ranks, ranks_per_node):
                yield _make(name, held, precision, limit, checkpointing=checkpointing, **axes)
        for tensor in _list_tensor_degrees(held, num_ranks, ranks_per_node):
            shard = num_ranks // tensor
            name = f"TP {tensor} x FSDP {shard}" if shard > 1 else f"TP {tensor}"
            for checkpointing in ways:
                yield _make(
                    name, held, precision, limit, checkpointing=checkpointing, shard=shard, tensor=tensor
                )
        for checkpointing in ways:
            yield from _list_parted(held, precision, num_ranks, ranks_per_node, limit, schedule, microbatches, checkpointing=checkpointing)  # fmt: skip


def _list_parted(
    held: Facts, precision: str, num_ranks: int, ranks_per_node: int, limit: int | None, schedule: str, microbatches: int | None, *, checkpointing: bool
) -> Iterator[Composition]:  # fmt: skip
    """Yield the pipelines, and one process with several devices, where the model can be cut."""
    if held.row is None or num_ranks == 1 or not (held.row.is_traced or held.replicated is None):
        return
    for pipeline in list_degrees(held.row, num_ranks):
        number = 2 * pipeline if microbatches is None else microbatches
        if schedule == "gpipe" or number >= pipeline:  # 1F1B takes no fewer
            yield from _make_pipelines(held, precision, limit, pipeline, num_ranks // pipeline, schedule, number, checkpointing=checkpointing)  # fmt: skip
    if num_ranks <= min(ranks_per_node, len(held.row.blocks)):
        yield _make_placed(held, precision, limit, num_ranks, checkpointing=checkpointing)


def _list_data_axes(num_ranks: int, ranks_per_node: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if num_ranks == 1:
        yield "one rank", {}
        return
    yield "DDP", {"replicate": num_ranks}
    yield "ZeRO-1", {"replicate": num_ranks, "shards_optimizer": True}
    if num_ranks > ranks_per_node > 1 and num_ranks % ranks_per_node == 0:
        nodes = num_ranks // ranks_per_node
        yield f"HSDP {nodes} x {ranks_per_node}", {"replicate": nodes, "shard": ranks_per_node}
    yield "FSDP", {"shard": num_ranks}


def _list_tensor_degrees(held: Facts, num_ranks: int, ranks_per_node: int) -> Iterator[int]:
    most = min(num_ranks, ranks_per_node, held.tensor_degrees)
    yield from (one for one in (2**power for power in range(1, 10))
                if one <= most and num_ranks % one == 0 and ranks_per_node % one == 0 and held.tensor_degrees % one == 0)  # fmt: skip


# ------------------------------------------------------------ what each needs


def _make(name: str, held: Facts, precision: str, limit: int | None, **axes: Any) -> Composition:
    memory = _count(held, **{"replicate": 1, "shard": 1, "tensor": 1, "shards_optimizer": False} | axes)
    return _judge(name, precision, limit, memory, **axes)


def _make_pipelines(
    held: Facts, precision: str, limit: int | None, pipeline: int, beside: int, schedule: str, microbatches: int, *, checkpointing: bool
) -> Iterator[Composition]:  # fmt: skip
    assert held.row is not None  # noqa: S101 - looked at before
    stages = cut_evenly(held.row, pipeline)
    for axis, name in (("replicate", "DDP"), ("shard", "FSDP")):
        if beside == 1 and axis == "shard":
            continue
        parts = tuple(
            _count_part(
                held, stage, count_in_flight(schedule, number, pipeline, microbatches), microbatches,
                **{"replicate": 1, "shard": 1, axis: beside}, checkpointing=checkpointing,
            ) for number, stage in enumerate(stages)
        )  # fmt: skip
        text = f"PP {pipeline}{f' x {name} {beside}' if beside > 1 else ''} ({schedule}, {microbatches} micro-batches)"
        yield _choose_largest(text, precision, limit, parts, **{axis: beside}, pipeline=pipeline, schedule=schedule, microbatches=microbatches, checkpointing=checkpointing)  # fmt: skip


def _make_placed(
    held: Facts, precision: str, limit: int | None, devices: int, *, checkpointing: bool
) -> Composition:
    assert held.row is not None  # noqa: S101 - looked at before
    sizes = {one.name: int(math.prod(one.shape) * (one.itemsize + (one.itemsize + one.states_itemsize) * one.is_trained)) for one in held.weights}  # fmt: skip
    parts = tuple(
        _count_part(held, part, 1, 0, replicate=1, shard=1, checkpointing=checkpointing)
        for part in cut_by_size(held.row, sizes, devices)
    )
    return _choose_largest(f"one process, placed over {devices}", precision, limit, parts, devices=devices, checkpointing=checkpointing)  # fmt: skip


def _judge(name: str, precision: str, limit: int | None, memory: Memory, **facts: Any) -> Composition:
    return Composition(name=name, precision=precision, memory=memory, fits=None if limit is None else memory.total <= limit, **facts)  # fmt: skip


def _choose_largest(name: str, precision: str, limit: int | None, parts: tuple[Memory, ...], **facts: Any) -> Composition:  # fmt: skip
    return _judge(name, precision, limit, max(parts, key=lambda one: one.total), parts=parts, **facts)


def _count_part(held: Facts, part: Part, num_in_flight: int, num_micro_batches: int, *, replicate: int, shard: int, checkpointing: bool) -> Memory:  # fmt: skip
    row = held.row
    assert row is not None  # noqa: S101 - looked at before
    weights = [one for one in held.weights if one.name in part.weights]
    memory = _sum_up(held, weights, shard=shard, tensor=1)
    kept = row.sharded if shard > 1 else row.replicated
    communication = _count_gathered(weights, 1) if shard > 1 else memory.gradients if replicate > 1 else 0
    if kept is None:
        return replace(memory, communication=communication)
    return replace(
        memory,
        communication=communication + part.count_buffers(kept, num_micro_batches),
        activations=part.count_saved(kept, num_in_flight, checkpointing=checkpointing) + kept.largest,
    )


def _count(held: Facts, *, replicate: int, shard: int, tensor: int, shards_optimizer: bool, checkpointing: bool) -> Memory:  # fmt: skip
    # With TP, `fully_shard` keeps the weights and gathers them, also on a mesh of one.
    is_sharded = shard > 1 or tensor > 1
    memory = _sum_up(held, held.weights, shard=shard, tensor=tensor)
    saved = held.sharded if is_sharded else held.replicated
    whole = [(one, _count_own(one, shard, tensor)) for one in held.weights if one.is_trained]
    optimizer, communication = memory.optimizer, 0
    if shards_optimizer:
        optimizer = _largest_share([(count, _count_states(one, count)) for one, count in whole], replicate)
    if is_sharded:
        communication = _count_gathered(held.weights, tensor)
    elif replicate > 1:
        communication = max((count * one.itemsize for one, count in whole), default=0)
    activations = saved and saved.saved(tensor=tensor, checkpointing=checkpointing) + saved.largest
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

    The parameters outside of blocks stay gathered from forward to backward, as ``fully_shard`` does with the root, and so do
    their gradients until the end. That is all of it in the backward of the largest blocks, or at the end, when gradients of
    the root are copied, in the dtype of the shards, into the buffer that is scattered, as those of a block are before.
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
