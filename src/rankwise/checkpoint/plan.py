"""Which rank writes which box of which tensor, and where the boxes that a rank needs lie: torch's own planners.

``torch.distributed.checkpoint`` works out both from plain tensors and DTensors, so that a state saved by any number of
ranks loads on any other. Only its planning is used here: its bytes are pickled, and nobody notices if they change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.shard import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from rankwise.checkpoint.manifest import Index

#: Plain tensors above this are written by several ranks, each some of the rows.
_LARGE_BYTES = 32 << 20


def list_boxes(tensors: Mapping[str, torch.Tensor], world_size: int, shared: Set[str]) -> list[Box]:
    """Return all that this rank has and could write, large things first.

    Args:
        tensors: By name.
        world_size: How many ranks there are.
        shared: Names of plain tensors that are the same on all ranks.

    Raises:
        CheckpointError: A DTensor whose values are not added up yet.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(
                f"{name} is a DTensor whose shards are still to be added up: {tensor.placements}",
                hint="save tensor.full_tensor(), or redistribute it first",
            )
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    shared = shared | {name for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    items = planner.create_local_plan().items
    boxes = [box for item in items for box in _cut(_box_of(item, shared), world_size)]
    # The greedy sharing below is fair if large ones come first.
    return sorted(boxes, key=lambda box: -box.size)


def _box_of(item: WriteItem, shared: Set[str]) -> Box:
    data = item.tensor_data
    assert data is not None  # noqa: S101 - only tensors were given
    return Box(
        item.index.fqn, str(data.properties.dtype).removeprefix("torch."), data.properties.dtype.itemsize, tuple(data.size),
        tuple(data.chunk.offsets), tuple(data.chunk.sizes), item.type is WriteItemType.SHARD, item.index.fqn in shared,
    )  # fmt: skip


def _cut(box: Box, world_size: int) -> list[Box]:
    """Cut what all ranks have a copy of into rows, so that one huge tensor is not one rank's work."""
    if 0 in box.shape and box.shape != box.whole:
        return []  # the empty shard of a rank that came away with nothing
    if box.is_shard or not box.is_shared or world_size == 1 or box.size <= _LARGE_BYTES or box.shape[0] < 2:
        return [box]
    num_pieces = min(box.shape[0], math.ceil(box.size / _LARGE_BYTES))
    edges = [box.shape[0] * piece // num_pieces for piece in range(num_pieces + 1)]
    rest = box.offsets[1:]
    return [
        replace(box, offsets=(start, *rest), shape=(end - start, *box.shape[1:]), is_shard=True)
        for start, end in pairwise(edges)
    ]


def share_out(boxes_by_rank: Sequence[Sequence[Box]], *, all_there: bool = True) -> list[list[Box]]:
    """Give each box that several ranks have to one of them: to the first, or of what is shared to the one with the least to write.

    What is not known to be equal must come from one rank: a part of it from each would be a state that no rank has had.

    Args:
        boxes_by_rank: What each rank has.
        all_there: Whether these ranks have all tensors whole between them; those of one host among several need not.

    Returns:
        What each rank writes; the same on every rank, as nothing else is looked at.

    Raises:
        CheckpointError: The boxes don't make up the tensors.
    """
    _check_agreement(boxes_by_rank)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    plans = []
    for boxes in boxes_by_rank:
        fitting = [box for box in boxes if box.is_shared or (box.tensor, box.offsets) not in seen]
        seen |= {(box.tensor, box.offsets) for box in boxes}
        plans.append(SavePlan([_item_of(box) for box in fitting]))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if not all_there:
        return [[_box_of(item, set()) for item in plan.items] for plan in planner._dedup_save_plans(plans)]
    try:
        shared, _ = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(
            f"the ranks' tensors don't fit together: {error}",
            hint="a tensor that differs between ranks goes into checkpoint.PerRank(...)",
        ) from error
    return [[_box_of(item, set()) for item in plan.items] for plan in shared]


def _item_of(box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape))
    properties = TensorProperties(dtype=getattr(torch, box.dtype))
    return WriteItem(
        index=MetadataIndex(box.tensor, box.offsets),
        type=WriteItemType.SHARD if box.is_shard else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(box.whole)),
    )


def _check_agreement(boxes_by_rank: Sequence[Sequence[Box]]) -> None:
    seen: dict[str, tuple[int, Box]] = {}
    for rank, boxes in enumerate(boxes_by_rank):
        for box in boxes:
            first, other = seen.setdefault(box.tensor, (rank, box))
            if (other.dtype, other.whole) != (box.dtype, box.whole):
                raise CheckpointError(
                    f"{box.tensor} is {other.dtype} {list(other.whole)} on rank {first} and {box.dtype} {list(box.whole)} on rank {rank}",
                    hint="a tensor that differs between ranks goes into checkpoint.PerRank(...)",
                )


def find_box(tensors: Mapping[str, torch.Tensor], box: Box) -> torch.Tensor:
    """Return the values of a box, shape ``box.shape``, without a copy."""
    tensor = tensors[box.tensor]
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if tuple(tensor.shape) == box.shape:
        return tensor
    return tensor[box.offsets[0] : box.offsets[0] + box.shape[0]]


@final
@dataclass(frozen=True, slots=True)
class Reads:
    """What a rank reads.

    Attributes:
        by_chunk: For a tensor and the number of its chunk, what of it goes where.
        planner: Finds the places.
    """

    by_chunk: Mapping[tuple[str, int], Sequence[ReadItem]]
    planner: Any

    def deliver(self, item: ReadItem, chunk: torch.Tensor) -> None:
        """Copy what an item needs of a chunk, of the chunk's shape, to its place, which may be on another device."""
        source = chunk
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, start, length)
        target = self.planner.resolve_tensor(item).detach()
        target.copy_(source)


def plan_reads(targets: Mapping[str, torch.Tensor], index: Index) -> Reads:
    """Work out which chunks hold what a rank needs.

    Args:
        targets: By name, tensors and DTensors to fill; shapes must be those that were saved.
        index: Where everything lies.
    """
    saved: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
            size=torch.Size(entry.shape),
            chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape)) for c in entry.chunks],
        )
        for name in targets
        for entry in [index.tensors[name]]
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), Metadata(saved), is_coordinator=True)
    by_chunk: dict[tuple[str, int], list[ReadItem]] = {}
    for item in planner.create_local_plan().items:
        number = item.storage_index.index
        assert number is not None  # noqa: S101 - the planner always says it
        by_chunk.setdefault((item.storage_index.fqn, number), []).append(item)
    return Reads(by_chunk, planner)
