"""Where a checkpoint that all ranks can load lies: in the folder, or in the memory of the job's hosts.

The ranks look, tell each other what they see, and agree on a list of candidates, the latest first.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rankwise.base.errors import CheckpointError
from rankwise.base.rank_names import name_ranks
from rankwise.checkpoint.folder import list_checkpoints, open_checkpoint, read_contents
from rankwise.checkpoint.manifest import MANIFEST, Index, Manifest, TensorEntry, dump_manifest
from rankwise.checkpoint.memory import find_memory
from rankwise.checkpoint.rng import RNG
from rankwise.checkpoint.tree import list_tensors
from rankwise.checkpoint.writing import warn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankwise.checkpoint.manifest import Chunk
    from rankwise.checkpoint.ranks import Ranks

#: A tensor and the number of its chunk.
Key = tuple[str, int]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that some rank sees.

    Attributes:
        serial: Its serial.
        step: Its step.
        name: Of its folder.
        seal: A checksum of its manifest, which has those of all its files in it.
        in_memory: Whether it lies in a host's memory.
    """

    serial: int
    step: int
    name: str
    seal: int
    in_memory: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint that all ranks have agreed to load; the same on every rank but for ``here``.

    Attributes:
        manifest: What it says of itself.
        index: What it holds.
        here: Files that this rank can read, by chunk.
        senders: A rank that can read it, by chunk; empty if every rank can read all by itself.
    """

    manifest: Manifest
    index: Index
    here: Mapping[Key, tuple[Path, Chunk]]
    senders: Mapping[Key, int]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one rank sees.

    Attributes:
        candidates: Whole ones, the latest first.
        problems: What is wrong with others that are, or may be, later.
        newer: Which of them a later rankwise has written.
        memory: Where its host keeps copies; None for nowhere.
    """

    candidates: list[Candidate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    memory: str | None
    newer: list[str] = field(default_factory=list)


def look(folder: Path, step: int | None) -> View:
    """Look at what this rank sees."""
    memory = find_memory(folder)
    view = View(memory=None if memory is None else str(memory))
    for place in (folder, memory):
        if place is None:
            continue
        try:
            found = [open_checkpoint(place)] if (place / MANIFEST).exists() else list_checkpoints(place)
        except CheckpointError as error:
            view.problems.append(error.message)
            continue
        is_older = False
        for one in found:
            if step is not None and one.step != step:
                continue
            if one.is_newer:
                view.newer.append(str(one.problem))
            if one.problem or one.manifest is None:
                if not is_older or one.manifest is None:
                    view.problems.append(str(one.problem))
                continue
            seal = zlib.crc32(dump_manifest(one.manifest))
            is_older = True
            view.candidates.append(
                Candidate(
                    serial=one.manifest.serial, step=one.step, name=one.path.name, seal=seal, in_memory=place is memory
                )
            )
    return view


def choose(folder: Path, views: Sequence[View], step: int | None) -> list[Candidate]:
    """Return what all ranks will try in turn: the same list on every rank, as nothing but the views decides.

    Raises:
        CheckpointError: There are checkpoints, and none that rank 0 or any host's memory has whole; or not of this
            step.
    """
    for rank, view in enumerate(views):
        if view.newer:
            raise CheckpointError(
                view.newer[0], rank=rank,
                hint="install the rankwise that wrote it, or a later one; to continue from an older checkpoint, pass its step",
            )  # fmt: skip
    on_disk = [one for one in views[0].candidates if not one.in_memory]
    # Hosts seal their own manifests: it is one save by its serial.
    in_memory = {one.serial: one for view in views for one in view.candidates if one.in_memory}
    chosen = sorted([*on_disk, *in_memory.values()], key=lambda one: (one.serial, one.in_memory), reverse=True)
    if chosen:
        return chosen
    for rank, view in enumerate(views):
        if view.candidates:
            raise CheckpointError(
                f"rank 0 sees no checkpoint in {folder}, and rank {rank} sees {view.candidates[0].name}",
                rank=0,
                hint="pass a folder that rank 0's host has, or copy the checkpoint there",
            )
    if views[0].problems:
        raise CheckpointError(
            f"no checkpoint in {folder} is complete: {'; '.join(views[0].problems[:3])}",
            rank=0,
            hint="use a backup, or start again in another folder",
        )
    if step is not None:
        there = sorted({one.step for one in list_checkpoints(folder)}) if folder.is_dir() else []
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has {there or 'none'}")
    return []


def open_together(folder: Path, ranks: Ranks, views: Sequence[View], chosen: Candidate) -> Opened | str:
    """Read the manifest and the index, and find out who can read what.

    Returns:
        The checkpoint, or why it can't be read.

    Collective: every rank.
    """
    return (
        _open_copies(folder, ranks, views, chosen) if chosen.in_memory else _open_folder(folder, ranks, views, chosen)
    )


def _open_folder(folder: Path, ranks: Ranks, views: Sequence[View], chosen: Candidate) -> Opened | str:
    path = folder if folder.name == chosen.name else folder / chosen.name
    blind = [rank for rank, view in enumerate(views) if chosen not in view.candidates]
    own = _open(path) if ranks.rank not in blind else None
    answers = ranks.control.exchange(own if ranks.rank == 0 or isinstance(own, str) else None, what="checkpoint.load")
    problem = next((one for one in answers if isinstance(one, str)), None)
    if problem is not None:
        return problem
    manifest, index = answers[0]
    places = locate_chunks(path, index)
    if blind and ranks.rank == 0:
        warn(f"{name_ranks(blind)} can't see {path}: rank 0 reads it for all")
    return Opened(
        manifest=manifest,
        index=index,
        here={} if own is None else places,
        senders=dict.fromkeys(places, 0) if blind else {},
    )


def locate_chunks(path: Path, index: Index) -> dict[Key, tuple[Path, Chunk]]:
    """Return where the chunks of a checkpoint are that lies in one folder."""
    return {
        (name, number): (path, chunk)
        for name, entry in index.tensors.items()
        for number, chunk in enumerate(entry.chunks)
    }


def _open_copies(folder: Path, ranks: Ranks, views: Sequence[View], chosen: Candidate) -> Opened | str:
    """Put together what the hosts have: of a sharded state each has a part, of a copied one each has all."""
    mine = next((one for one in views[ranks.rank].candidates if one.in_memory and one.serial == chosen.serial), None)
    memory = find_memory(folder)
    path = memory / mine.name if memory is not None and mine is not None else None
    own = None if path is None else _open(path)
    speaks = views[ranks.rank].memory not in {view.memory for view in views[: ranks.rank]}
    answers = ranks.control.exchange(own if speaks or isinstance(own, str) else None, what="checkpoint.load")
    problem = next((one for one in answers if isinstance(one, str)), None)
    if problem is not None:
        return problem
    found = [one for one in answers if one is not None]
    index = _merge([one[1] for one in found], found[0][0].world_size)
    if isinstance(index, str):
        return f"the copies of step {chosen.step} in memory are no longer complete: {index}"
    number_of = {
        (name, chunk.offsets): (name, place)
        for name, entry in index.tensors.items()
        for place, chunk in enumerate(entry.chunks)
    }
    mine_here = locate_chunks(path, own[1]) if path is not None and isinstance(own, tuple) else {}
    here = {number_of[key[0], place[1].offsets]: place for key, place in mine_here.items()}
    own_keys = None if len(here) == len(number_of) else sorted(here)
    has = ranks.control.exchange(own_keys, what="checkpoint.load")
    senders = {
        key: next(rank for rank, keys in enumerate(has) if keys is None or key in keys)
        for key in (number_of.values() if any(one is not None for one in has) else ())
    }
    return Opened(manifest=found[0][0], index=index, here=here, senders=senders)


def _open(path: Path) -> tuple[Manifest, Index] | str:
    try:
        return read_contents(open_checkpoint(path))
    except CheckpointError as error:
        return error.message


def _merge(indices: Sequence[Index], num_ranks: int) -> Index | str:
    """Bring the hosts' indices together; return what is missing if they don't make up a whole."""
    tensors: dict[str, TensorEntry] = {}
    for name in sorted({name for index in indices for name in index.tensors}):
        entries = [index.tensors[name] for index in indices if name in index.tensors]
        chunks = {chunk.offsets: chunk for entry in reversed(entries) for chunk in entry.chunks}
        if sum(math.prod(chunk.shape) for chunk in chunks.values()) != math.prod(entries[0].shape):
            return f"a part of {name} was on a host that is gone"
        ordered = sorted(chunks.values(), key=lambda chunk: chunk.offsets)
        tensors[name] = TensorEntry(entries[0].dtype, entries[0].shape, tuple(ordered))
    lost = set(list_tensors(list(indices[0].trees.values()))) - tensors.keys()
    if lost:
        return f"{min(lost)} was on a host that is gone"
    rank_trees = {rank: trees for index in indices for rank, trees in index.rank_trees.items()}
    # Without its random generators a rank can go on, seeded anew; without anything else of its own it can't.
    owned = {part for trees in rank_trees.values() for part in trees} - {RNG}
    for part in sorted(owned):
        for rank in range(num_ranks):
            if part not in rank_trees.get(rank, {}):
                return f"{part} of rank {rank} was on a host that is gone"
    return Index(tensors, indices[0].trees, rank_trees)
