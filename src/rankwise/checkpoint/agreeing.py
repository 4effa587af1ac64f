"""Before a checkpoint is written: the ranks agree on what it is, who writes what, and where."""

from __future__ import annotations

import hashlib
import json
import operator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CheckpointError, UsageError
from rankwise.checkpoint import lock
from rankwise.checkpoint.disk import put_in_words, remove_quietly
from rankwise.checkpoint.folder import name_temporary, next_serial, sweep
from rankwise.checkpoint.memory import check_space, find_memory
from rankwise.checkpoint.parts import Flat, digest_contents, flatten, make_own
from rankwise.checkpoint.plan import list_boxes, share_out
from rankwise.checkpoint.writing import warn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankwise.checkpoint.disk import Disk
    from rankwise.checkpoint.ranks import Ranks
    from rankwise.checkpoint.retention import Keep
    from rankwise.checkpoint.shard import Box

#: NFS servers give a client that is silent up to so long.
_LEASE_S = 120.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a rank was asked to save.

    Attributes:
        shown_folder: Where checkpoints are, as the caller said it.
        folder: The same, from the root.
        place: Where this one goes: there, or into the host's memory.
        state: The parts by name.
        step: The step.
        metrics: What it is judged by; None: nobody has thought of it.
        keep: Which older ones stay.
        can_pickle: Whether objects that are not plain data may be pickled.
    """

    shown_folder: str
    folder: Path
    place: Path
    state: Mapping[str, Any]
    step: int
    metrics: Mapping[str, float] | None
    keep: Keep | None
    can_pickle: bool

    @property
    def what(self) -> str:
        """What the ranks are doing, for errors."""
        return f"checkpoint.save of step {self.step}"


@final
@dataclass(slots=True, eq=False)
class Agreement:
    """What was agreed on at the last save into a folder, and holds as long as the state has the same form.

    Attributes:
        form: Names, types and shapes of this rank's tensors, and what became of them.
        boxes: What this rank could share out.
        alone: What only this rank has.
        basis: What the ranks had said when they shared the work.
        share: What this rank writes of ``boxes``.
        warned: Parts of which it was said that they differ.
        serial: The last checkpoint's, saved or loaded; 0 before the first.
        was_listed: Whether the folder was looked at for it, with the lock in hand.
    """

    form: object = None
    boxes: list[Box] = field(default_factory=list)
    alone: list[Box] = field(default_factory=list)
    basis: object = None
    share: list[Box] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    serial: int = 0
    was_listed: bool = False


def agree(ranks: Ranks, before: Agreement, request: Request) -> tuple[Flat, list[Box]]:
    """Take the state apart, find out whether the ranks mean the same, and what this one is to write.

    Args:
        ranks: Who saves.
        before: What was agreed on at the save before; brought up to date.
        request: What this rank was asked to save.

    Returns:
        The state, and the boxes that this rank writes.

    Raises:
        UsageError: The ranks were asked for different things, or for what makes no sense.
        CheckpointError: Something can't be saved; on every rank.

    Collective: every rank.
    """
    flat = Flat()
    error: Exception | None = None
    body: dict[str, Any] = {}
    try:
        _check_step(request.step)
        _check_metrics(request.metrics or {})
        if request.keep is not None and request.keep.best and ranks.rank == 0:
            _check_judged(request.metrics, request.keep)
        flat = flatten(request.state, ranks.rank, can_pickle=request.can_pickle)
        _part_boxes(before, flat, ranks)
        body = {
            "folder": request.shown_folder,
            "step": operator.index(request.step),
            "parts": {part: _digest(tree) for part, tree in flat.trees.items()},
            "contents": digest_contents(flat) if ranks.world_size > 1 else {},
            "own parts": sorted(flat.rank_trees),
            "boxes": _digest([[box.name, box.dtype, box.whole, box.is_shared] for box in before.boxes]),
        }
    except Exception as found:  # noqa: BLE001 - the user's state_dict may raise anything
        # Not raised before the others know: they would wait.
        error, body = found, put_in_words(found)
    answers = ranks.control.compare(json.dumps(body), what=request.what)
    if error is not None:
        raise error
    words = [json.loads(text) for text in answers] if answers else [body]
    _check_words(words, ranks)
    # Tensors of other shapes are an error, which the share-out tells.
    kinds = ("parts", "contents") if len({word["boxes"] for word in words}) == 1 else ("parts",)
    differing = [
        part for part in flat.trees if any(len({word[kind].get(part) for word in words}) > 1 for kind in kinds)
    ]
    for part in differing:
        make_own(flat, part, ranks.rank)
        if part not in before.warned and ranks.rank == 0:
            before.warned.add(part)
            warn(
                f"the part {part!r} of the state differs between ranks and is saved for each: it can't be loaded at another world size "
                "(if intended: checkpoint.PerRank; if not: make it equal before)"
            )
    if differing:
        _part_boxes(before, flat, ranks)
    basis = (ranks.members, differing, [word["boxes"] for word in words])
    if before.basis != basis:
        by_rank: Sequence[Sequence[Box]] = [before.boxes] * ranks.world_size
        if differing or len(set(basis[2])) > 1:
            by_rank = ranks.control.exchange(before.boxes, what=request.what)
        shares = share_out([by_rank[rank] for rank in ranks.members], all_there=len(ranks.mains) == 1)
        before.share, before.basis = shares[ranks.members.index(ranks.rank)], basis
    return flat, [*before.share, *before.alone]


def _part_boxes(before: Agreement, flat: Flat, ranks: Ranks) -> None:
    """List what the ranks share out among them, and what is this rank's own: nobody else has a tensor of that name."""
    tensors = [
        (name, one.dtype, one.shape, getattr(one, "device_mesh", None), getattr(one, "placements", None))
        for name, one in flat.tensors.items()
    ]
    form = (ranks.world_size, flat.shared, tensors)
    if form == before.form:
        return
    boxes, mark = list_boxes(flat.tensors, ranks.world_size, flat.shared), f"@{ranks.rank}"
    own = {name for name in flat.tensors if name.partition(".")[0].endswith(mark)}
    before.boxes = [box for box in boxes if box.tensor not in own]
    before.alone = [box for box in boxes if box.tensor in own]
    before.form = form


def _check_step(step: object) -> None:
    is_whole = hasattr(step, "__index__") and not isinstance(step, (bool, torch.Tensor))
    if not is_whole or operator.index(step) < 0:  # type: ignore[arg-type]
        raise UsageError(f"checkpoint.save(step={step!r})", hint="a step is a whole number, 0 or more")


def _check_metrics(metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        try:
            float(value)
        except (TypeError, ValueError):
            raise UsageError(f"checkpoint.save(metrics={{{name!r}: {value!r}}})", hint="a metric is a number") from None


def _check_judged(metrics: Mapping[str, float] | None, keep: Keep) -> None:
    if metrics is None or (metrics and keep.metric not in metrics):
        raise UsageError(
            f"Keep(best={keep.best}) judges by the metric {keep.metric!r}, but there is {', '.join(metrics or ()) or 'none'}",
            hint=f"checkpoint.save(..., metrics={{{keep.metric!r}: value}}), or Keep(metric=...)",
        )


def _check_words(words: Sequence[Mapping[str, Any]], ranks: Ranks) -> None:
    failed = [rank for rank, word in enumerate(words) if "error" in word]
    if failed:
        raise CheckpointError(
            f"the state could not be taken apart: {words[failed[0]]['error']}",
            rank=failed[0],
            hint="the error on that rank has the details",
        )
    for what, hint in (
        ("step", "count steps in the same way on all ranks"),
        (
            "folder",
            "a name with the time or a random number differs by rank: make it on rank 0 and broadcast it",
        ),
        ("own parts", "pass the same parts on every rank: those of PerRank too"),
    ):
        if len({json.dumps(word[what]) for word in words}) > 1:
            other = next(rank for rank, word in enumerate(words) if word[what] != words[0][what])
            raise UsageError(
                f"checkpoint.save: the {what} is {words[0][what]!r} on rank 0 and {words[other][what]!r} on rank {other}",
                rank=ranks.rank,
                hint=hint,
            )
    parts = [set(word["parts"]) for word in words]
    for rank, own in enumerate(parts):
        if own != parts[0]:
            raise UsageError(
                f"checkpoint.save: rank 0 and rank {rank} don't save the same parts: {sorted(own ^ parts[0])} only on one of them",
                rank=ranks.rank,
                hint="pass the same parts on every rank; what only one has can be None on the others",
            )


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()


@cache
def _warn_of_no_memory() -> None:
    warn("no copies in memory: this job was not started by `rankwise run`, or its host has no /dev/shm; saving to disk")


def find_place(folder: Path, ranks: Ranks, *, in_memory: bool) -> tuple[Path, Ranks]:
    """Return the folder to write into, and the ranks as they share it.

    Collective: every rank, if it is to be memory.
    """
    if not in_memory:
        return folder, ranks
    memory = find_memory(folder)
    parted = ranks.of_folder(str(memory or ""))
    if memory is None or parted.has_blank:
        if ranks.is_main:
            _warn_of_no_memory()
        return folder, ranks
    return memory, parted


def _take_patiently(folder: Path) -> None:
    """Take a folder's lock; a file server keeps that of a host which has crashed for as long as its lease lasts."""
    end_s, is_reported = SYSTEM_CLOCK.monotonic() + _LEASE_S, False
    while True:
        try:
            lock.take(folder)
        except CheckpointError as error:
            if lock.is_held_here(folder) or SYSTEM_CLOCK.monotonic() > end_s:
                raise
            if not is_reported:
                warn(f"{error.message}; waiting for {_LEASE_S:.0f} s, as a crashed host's lock is kept for some time")
            is_reported = True
            SYSTEM_CLOCK.sleep(1.0)
        else:
            return


def claim(folder: Path, ranks: Ranks) -> None:
    """Hold a folder for this job before anything is written there: a second job is refused at its start, and not at its first save.

    Args:
        folder: Where the job's checkpoints will be; made if it is not there.
        ranks: Of the job.

    Raises:
        CheckpointError: Another job holds it; the same on every rank.

    Collective: every rank.
    """
    word: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _take_patiently(folder)
        except CheckpointError as error:
            word = put_in_words(error)
        except OSError:
            pass  # nobody can write there: the first save says so, if there is one
    word = ranks.control.exchange(word, what="locking the folder of the training")[0]
    if word:
        raise CheckpointError(word["error"], rank=0, hint=word["hint"])


def begin(
    ranks: Ranks, before: Agreement, request: Request, *, size: int, problem: str | None, disk: Disk
) -> tuple[Path, int]:
    """Let the first rank of each folder make one to write into; return it, and the checkpoint's serial.

    Raises:
        CheckpointError: It can't, or some rank has a problem; the same on every rank.

    Collective: every rank.
    """
    word: dict[str, Any] = {}
    if problem is not None:
        word = {"error": problem, "hint": None}
    elif ranks.is_main:
        word = _open(before, request, size * len(ranks.members), disk)
    words = ranks.control.exchange(word, what=request.what)
    failed = next((rank for rank, one in enumerate(words) if "error" in one), None)
    if failed is not None:
        if "temporary" in word:
            remove_quietly(disk, request.place / word["temporary"])
        raise CheckpointError(
            f"step {request.step} was not saved: {words[failed]['error']}", rank=failed, hint=words[failed]["hint"]
        )
    before.serial = max(words[rank]["serial"] for rank in ranks.mains)
    return request.place / words[ranks.main]["temporary"], before.serial


def _make_folders(place: Path, disk: Disk) -> None:
    """Make a folder and those above it, so that they survive a loss of power like what comes into them."""
    missing = [path for path in (place, *place.parents) if not path.exists()]
    place.mkdir(parents=True, exist_ok=True)
    for path in missing:
        disk.sync_folder(path.parent)


def _open(before: Agreement, request: Request, size: int, disk: Disk) -> dict[str, Any]:
    folder, place = request.folder, request.place
    try:
        _make_folders(place, disk)
        # Without locks (some network file systems) nobody knows whose the leftovers are: they stay.
        is_locked = lock.take(place)
        if is_locked:
            sweep(place, disk)
        else:
            warn(f"{place} is on a file system without locks: a second job that writes there would not be noticed")
        if place is not folder:
            check_space(place, size)
        serials = [before.serial + 1]
        if not (before.was_listed and is_locked):  # with the lock nobody else writes there
            serials += [next_serial(one) for one in (folder, find_memory(folder)) if one is not None]
            before.was_listed = True
        temporary = name_temporary(place, request.step)
        disk.make_folder(temporary)
        return {"temporary": temporary.name, "serial": max(serials)}
    except (CheckpointError, OSError) as error:
        return put_in_words(error, f"can't write into {place}")
