"""Reads the samples of a step from a data set that can only be iterated; stands in each worker.

``stride``: all ranks and workers read the same stream. Step k is its elements kB to (k+1)B, and rank r of W keeps every
W-th. Whoever gets the work item of a step reads on to it, so that neither the number of ranks nor that of workers changes
what a step holds. The price: each worker reads the whole stream.

``shard``, ``dataset``: each worker of each rank has a stream of its own, which ends when it ends.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Literal, cast, final

from torch.utils.data import _utils, get_worker_info

from rankwise.base.errors import DataError
from rankwise.data.batches import Packing, WorkerBatch, cut_evenly, leave_note
from rankwise.data.map_reader import tell_epoch
from rankwise.data.schedule import count_micro_batches
from rankwise.data.seeding import kept_generators, seed_for

Split = Literal["stride", "shard", "dataset"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where a stream begins.

    Attributes:
        num_read: Samples that were read before.
        state: The stream's own state at that place, pickled; None: it is read again up to there.
    """

    num_read: int = 0
    state: bytes | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWorkItem:
    """The part of a step that one worker reads.

    Attributes:
        number: Which pass over the data; another one begins the streams anew.
        epoch: Of which epoch.
        shard: Which stream of this rank.
        start: At which element the step begins; None: where the stream stands.
        opening: With a worker's first work item of a pass, where to begin.
        is_blank: Nothing is to be read: it only passes the turn to the next worker.
    """

    number: int
    epoch: int
    shard: int = 0
    start: int | None = None
    opening: Opening | None = None
    is_blank: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How the elements of a stream are dealt out.

    Attributes:
        split: Who has which.
        rank: This rank.
        world_size: Among how many.
        num_shards: Streams of this rank, one for each worker; 1 without workers.
        global_batch: Samples of a step over all ranks.
        micro_batch: Most samples of one forward pass.
        drops_last: Leave out a last step that is not full.
        seed: Seeds each element by (seed, epoch, place); None: not at all.
    """

    split: Split
    rank: int
    world_size: int
    num_shards: int
    global_batch: int
    micro_batch: int | None
    drops_last: bool
    seed: int | None


@final
class StreamReader:
    """The stream as torch's DataLoader sees it: one request, one worker batch.

    Args:
        dataset: The user's.
        packing: How samples become a batch.
        dealing: How the elements are dealt out.
    """

    def __init__(self, dataset: Any, packing: Packing, dealing: Dealing) -> None:
        self._dataset, self._packing, self._dealing = dataset, packing, dealing
        self._stream: _Stream | None = None
        self._number, self._empty = -1, cast("Any", None)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, work_item: StreamWorkItem) -> WorkerBatch:
        """Read the part of a step that this rank has."""
        if work_item.is_blank:
            return WorkerBatch([], [])
        try:
            if self._dealing.seed is None or get_worker_info() is not None:
                return self._read(work_item)
            with kept_generators():
                return self._read(work_item)
        except DataError as error:
            return WorkerBatch([], [], fault=(error.message, error.hint or ""))

    def _read(self, work_item: StreamWorkItem) -> WorkerBatch:
        if work_item.number != self._number or self._stream is None:
            # What a pass that was left early has sent may never have been taken.
            self._number, self._stream, self._empty = work_item.number, self._open(work_item), None
        stream = self._stream
        if self._dealing.split == "stride":
            return self._read_stride(stream, work_item.start or 0)
        return self._read_shard(stream)

    def _open(self, work_item: StreamWorkItem) -> _Stream:
        dealing, dataset = self._dealing, self._dataset
        if dealing.split != "dataset" and getattr(_utils.worker, "_worker_info", None) is not None:
            # A data set that splits itself by worker would give a part of what is a part already.
            _utils.worker._worker_info = None
        name = 0 if dealing.split == "stride" else dealing.rank * dealing.num_shards + work_item.shard
        if dealing.split == "shard":
            dataset = dataset.shard(num_shards=dealing.world_size * dealing.num_shards, index=name)
        return _Stream(dataset, work_item.opening or Opening(), seed=dealing.seed, epoch=work_item.epoch, name=name)

    def _read_stride(self, stream: _Stream, start: int) -> WorkerBatch:
        """Read a whole step and keep this rank's part: only so all ranks know how many samples the last one has."""
        dealing, packing = self._dealing, self._packing
        stream.skip_to(start)
        samples = stream.read(dealing.global_batch)
        if dealing.drops_last and stream.has_ended and len(samples) < dealing.global_batch:
            samples = []
        samples, names = packing.sift(samples, range(start, start + len(samples)))
        made = WorkerBatch([], [], global_samples=len(samples), is_last=stream.has_ended)
        if samples:
            number = count_micro_batches(len(samples), dealing.world_size, dealing.micro_batch)
            parts = cut_evenly(samples[dealing.rank :: dealing.world_size], number)
            named = cut_evenly(names[dealing.rank :: dealing.world_size], number)
            empty = None if all(parts) else packing.pack_empty(samples[0])
            batches = [packing.pack(part, own) if part else empty for part, own in zip(parts, named, strict=True)]
            made = made._replace(batches=batches, counts=[len(part) for part in parts])
        return made._replace(num_read=stream.num_read, state=stream.save())

    def _read_shard(self, stream: _Stream) -> WorkerBatch:
        dealing, packing = self._dealing, self._packing
        own = len(range(dealing.rank, dealing.global_batch, dealing.world_size))
        start = stream.num_read
        samples = stream.read(max(1, own))
        samples, names = packing.sift(samples, range(start, start + len(samples)))
        num_parts = count_micro_batches(dealing.global_batch, dealing.world_size, dealing.micro_batch)
        parts, named = cut_evenly(samples, num_parts), cut_evenly(names, num_parts)
        empty = None
        if samples and self._empty is None:
            # Before the samples are packed: the user's function may change them.
            empty = self._empty = packing.pack_empty(samples[0])
        batches = [packing.pack(part, own) if part else None for part, own in zip(parts, named, strict=True)]
        return WorkerBatch(
            batches, [len(part) for part in parts], is_last=stream.has_ended,
            num_read=stream.num_read, state=stream.save(), empty=empty,
        )  # fmt: skip


@final
class _Stream:
    """One pass over a data set, from any place of it.

    Args:
        dataset: What to iterate.
        opening: Where to begin.
        seed: As for ``Dealing``.
        epoch: Which epoch.
        name: Tells this stream from the others of the job.
    """

    def __init__(self, dataset: Any, opening: Opening, *, seed: int | None, epoch: int, name: int) -> None:
        self._dataset, self._seed, self._path = dataset, seed, (epoch, name)
        self.num_read, self.has_ended = 0, False
        tell_epoch(dataset, epoch)
        if seed is not None:
            seed_for(seed, "stream", *self._path)
        state = None if opening.state is None else pickle.loads(opening.state)  # noqa: S301 - from our own checkpoint
        if state is not None and _has_state(dataset):
            dataset.load_state_dict(state)
        self._iterator: Any = iter(dataset)
        if state is not None:
            if _has_state(self._iterator):
                self._iterator.load_state_dict(state)
            self.num_read = opening.num_read
        self.skip_to(opening.num_read)

    def read(self, count: int) -> list[Any]:
        """Return the next elements, fewer at the end."""
        samples: list[Any] = []
        while len(samples) < count and not self.has_ended:
            if self._seed is not None:
                seed_for(self._seed, "element", *self._path, self.num_read)
            try:
                sample = next(self._iterator, self)
            except Exception as error:
                leave_note(error, f"while reading element {self.num_read} of the stream, in epoch {self._path[0]}")
                raise
            if sample is self:
                self.has_ended = True
            else:
                samples.append(sample)
                self.num_read += 1
        return samples

    def skip_to(self, place: int) -> None:
        """Read on to an element, and drop what comes before it."""
        while self.num_read < place and not self.has_ended:
            self.read(1)

    def save(self) -> bytes | None:
        """Return the state of the iterator or of the data set, if one of them offers it (torchdata's protocol)."""
        for holder in (self._iterator, self._dataset):
            if _has_state(holder):
                return pickle.dumps(holder.state_dict())
        return None


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
