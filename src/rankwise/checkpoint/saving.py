"""Save a training state: training stands still for a copy to host memory, and a folder appears when all of it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CheckpointError, RankwiseError, UsageError
from rankwise.checkpoint import lock
from rankwise.checkpoint.disk import REAL_DISK, remove_quietly, tell
from rankwise.checkpoint.folder import name_temporary, next_serial, sweep
from rankwise.checkpoint.manifest import Manifest
from rankwise.checkpoint.memory import check_space, find_memory
from rankwise.checkpoint.parts import Flat, PerRank, flatten, make_own
from rankwise.checkpoint.plan import Box, list_boxes, share_out
from rankwise.checkpoint.ranks import find_ranks
from rankwise.checkpoint.retention import Keep
from rankwise.checkpoint.rng import RandomStates
from rankwise.checkpoint.staging import Staging, lay_out
from rankwise.checkpoint.writing import Order, agree_on_call, carry_out, part_with_others, warn
from rankwise.runtime.context import find_current
from rankwise.runtime.stop_vote import StopVote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.checkpoint.disk import Disk
    from rankwise.checkpoint.ranks import Ranks

#: The part that the random generators' states are kept in.
RNG = "rng"

#: Seconds that a rank waits for the others' threads, when a save in the background has failed.
_VOTE_S = 30.0

#: Replaced by tests.
DISK: Disk = REAL_DISK


@final
@dataclass(slots=True, eq=False)
class Saving:
    """A save, which may still be going on.

    Attributes:
        step: The step that is saved.
        stall_s: Seconds that training stood still.
    """

    step: int
    stall_s: float = 0.0
    _is_alone: bool = field(default=True, repr=False)
    _path: Path | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _is_told: bool = field(default=False, repr=False)
    _vote: StopVote = field(default_factory=StopVote, repr=False)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is whole on the disk.

        Args:
            timeout_s: Seconds to wait; None: until it has ended, which has a bound of its own.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It could not be saved, or is not done in time.
        """
        if not self._done.wait(timeout_s):
            raise CheckpointError(f"step {self.step} is not saved after {timeout_s:g} s", hint="wait longer, or look at the disk")  # fmt: skip
        self._is_told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None  # noqa: S101 - done without an error
        return self._path


@final
@dataclass(slots=True, eq=False)
class _Slot:
    """What is kept between the saves into one folder."""

    staging: Staging = field(default_factory=Staging)
    last: Saving | None = None
    agreed_on: object = None
    share: list[Box] = field(default_factory=list)


_slots: dict[Path, _Slot] = {}
if hasattr(os, "register_at_fork"):
    # A forked child has none of the threads that write: it would wait for them for ever.
    os.register_at_fork(after_in_child=_slots.clear)


def save(  # noqa: PLR0913 - rarely more than three of them are given
    folder: str | Path,
    state: Mapping[str, Any],
    *,
    step: int,
    keep: Keep | None = None,
    metrics: Mapping[str, float] | None = None,
    background: bool = False,
    memory: bool = False,
    rng: bool = True,
    pickle: bool = False,
) -> Saving:
    """Save a state as ``folder/step-N``, which appears when it is whole and never before.

    The state is a dict of parts: modules (wrapped or not), optimizers, whatever has ``state_dict()`` and
    ``load_state_dict()``, tensors and DTensors, numbers, texts and containers of them. What all ranks have a copy of
    is written once, the ranks sharing the work; shards are written by one of those that have them. A part whose plain
    values differ between ranks, and what stands in ``PerRank``, is kept for each rank.

    Args:
        folder: Where checkpoints are; shared by all hosts, the same text on every rank.
        state: The parts by name.
        step: The step, 0 or more.
        keep: Which older ones stay; None: all.
        metrics: Numbers to judge it by, for ``keep``; rank 0's count.
        background: Whether to return once the values are in host memory; never are there two saves at once.
        memory: Whether to save into the host's memory, and not to the disk: the first thing that ``load`` looks at when the
            job is started again, as cheap as a copy, and gone with the job. Needs ``rankwise run``; elsewhere the disk is used.
            One copy is kept there.
        rng: Whether the states of the random generators are saved too, for each rank.
        pickle: Whether objects that are not plain data may be pickled.

    Returns:
        The save; without ``background`` it has ended.

    Raises:
        UsageError: The step or the folder differs between ranks, or is not sane.
        CheckpointError: Something can't be saved, the disk refused, or an earlier save in the background had failed; the same on
            every rank.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank, with the same parts.
    """
    folder, ranks = Path(folder), find_ranks()
    slot = _slots.setdefault(folder.resolve(), _Slot())
    if slot.last is not None and not slot.last._is_told:
        slot.last.wait()
    start = SYSTEM_CLOCK.monotonic()
    if rng and RNG not in state:
        state = {**state, RNG: PerRank(RandomStates(), at_other_size="keep")}
    place, ranks = _find_place(folder, ranks, in_memory=memory)
    flat, share = _agree(ranks, slot, folder, state, step, metrics, can_pickle=pickle)
    boxes, items = lay_out(share)
    data, problem = _copy(slot, boxes, flat)
    temporary, serial = _begin(ranks, folder, place, step, sum(item.size for item in items), problem)
    saving = Saving(step, _is_alone=ranks.world_size == 1)
    manifest = Manifest(step=step, serial=serial, world_size=ranks.world_size, files=(), mesh=_find_mesh(flat),
                        metrics={name: float(value) for name, value in (metrics or {}).items()}, parts=tuple(state))  # fmt: skip
    order = Order(ranks=ranks, disk=DISK, temporary=temporary, manifest=manifest, boxes=boxes, items=items, data=data,
                  trees=flat.trees, rank_trees=flat.rank_trees, keep=keep if place is folder else Keep(last=1), number=next(ranks.numbers))  # fmt: skip
    slot.last = saving
    saving.stall_s = SYSTEM_CLOCK.monotonic() - start
    if background:
        ctx = find_current()
        if ctx is not None:
            ctx.attend(at_step=check, before_leaving=_finish_all)
        # Not a daemon: the interpreter waits for it, so that a script may end right after its last save.
        threading.Thread(target=_run, args=(saving, order), name="rankwise-checkpoint").start()
    else:
        _run(saving, order)
        saving.stall_s = SYSTEM_CLOCK.monotonic() - start
        saving.wait()
    return saving


def _run(saving: Saving, order: Order) -> None:
    try:
        saving._path = carry_out(order)
    except Exception as error:  # noqa: BLE001 - told by whoever waits for it, on this rank
        saving._error = error
    except BaseException:
        # Ctrl-C in the foreground: the caller hears of it now, and the next save must not tell it again.
        saving._error = CheckpointError(f"step {saving.step} was not saved: it was interrupted")
        saving._is_told = True
        raise
    finally:
        saving._done.set()
    if saving._error is not None and threading.current_thread() is not threading.main_thread():
        warn(f"[rank {order.ranks.rank}] {saving._error}")
        agree_on_call(order, saving._vote)
    part_with_others(order)


# ------------------------------------------------ before anything is written


def _agree(ranks: Ranks, slot: _Slot, folder: Path, state: Mapping[str, Any], step: int, metrics: Mapping[str, float] | None, *, can_pickle: bool) -> tuple[Flat, list[Box]]:  # fmt: skip
    """Take the state apart, find out whether the ranks mean the same, and what this one is to write."""
    flat, boxes, alone = Flat(), list[Box](), list[Box]()
    error: Exception | None = None
    said: dict[str, Any] = {}
    try:
        _check_step(step)
        _check_metrics(metrics)
        flat = flatten(state, ranks.rank, can_pickle=can_pickle)
        boxes, alone = _part_boxes(flat, ranks)
        said = {
            "folder": str(folder),
            "step": step,
            "parts": {part: _digest(tree) for part, tree in flat.trees.items()},
            "own parts": sorted(flat.rank_trees),
            "boxes": _digest([[box.name, box.dtype, box.whole] for box in boxes]),
        }
    except Exception as found:  # noqa: BLE001 - the user's state_dict may raise anything
        # Not raised before the others know: they would wait.
        error, said = found, {"error": found.message if isinstance(found, RankwiseError) else f"{type(found).__name__}: {found}"}  # fmt: skip
    told = ranks.control.compare(json.dumps(said), what=f"checkpoint.save of step {step}")
    if error is not None:
        raise error
    words = [json.loads(text) for text in told] if told else [said]
    _check_words(words, ranks)
    differing = [part for part in flat.trees if len({word["parts"].get(part) for word in words}) > 1]
    for part in differing:
        make_own(flat, part, ranks.rank)
    if differing:
        boxes, alone = _part_boxes(flat, ranks)
    key = (ranks.members, differing, [word["boxes"] for word in words])
    if slot.agreed_on != key:
        by_rank: Sequence[Sequence[Box]] = [boxes] * ranks.world_size
        if differing or len(set(key[2])) > 1:
            by_rank = ranks.control.exchange(boxes, what=f"checkpoint.save of step {step}")
        shares = share_out([by_rank[rank] for rank in ranks.members], all_there=len(ranks.mains) == 1)
        slot.share, slot.agreed_on = shares[ranks.members.index(ranks.rank)], key
    return flat, [*slot.share, *alone]


def _part_boxes(flat: Flat, ranks: Ranks) -> tuple[list[Box], list[Box]]:
    """Return what the ranks share out among them, and what is this rank's own: nobody else has a tensor of that name."""
    boxes, mark = list_boxes(flat.tensors, ranks.world_size), f"@{ranks.rank}"
    own = {name for name in flat.tensors if name.partition(".")[0].endswith(mark)}
    return [box for box in boxes if box.tensor not in own], [box for box in boxes if box.tensor in own]


def _check_step(step: object) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UsageError(f"checkpoint.save(step={step!r})", hint="a step is a whole number, 0 or more")


def _check_metrics(metrics: Mapping[str, float] | None) -> None:
    for name, value in (metrics or {}).items():
        try:
            float(value)
        except (TypeError, ValueError):
            raise UsageError(f"checkpoint.save(metrics={{{name!r}: {value!r}}})", hint="a metric is a number") from None  # fmt: skip


def _check_words(words: Sequence[Mapping[str, Any]], ranks: Ranks) -> None:
    failed = [rank for rank, word in enumerate(words) if "error" in word]
    if failed:
        raise CheckpointError(f"the state could not be taken apart: {words[failed[0]]['error']}", rank=failed[0], hint="the error on that rank says more")  # fmt: skip
    for what, hint in (
        ("step", "count steps in the same way on all ranks"),
        (
            "folder",
            "a name with the time or a random number differs by rank: make it on rank 0 and broadcast it",
        ),
        ("own parts", "the same parts on every rank: those of PerRank too"),
    ):
        if len({json.dumps(word[what]) for word in words}) > 1:
            other = next(rank for rank, word in enumerate(words) if word[what] != words[0][what])
            raise UsageError(f"checkpoint.save: the {what} is {words[0][what]!r} on rank 0 and {words[other][what]!r} on rank {other}", rank=ranks.rank, hint=hint)  # fmt: skip
    parts = [set(word["parts"]) for word in words]
    for rank, own in enumerate(parts):
        if own != parts[0]:
            raise UsageError(f"checkpoint.save: rank 0 and rank {rank} don't save the same parts: {sorted(own ^ parts[0])} only on one of them", rank=ranks.rank, hint="give every rank the same parts; what only one has can be None on the others")  # fmt: skip


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


def _find_place(folder: Path, ranks: Ranks, *, in_memory: bool) -> tuple[Path, Ranks]:
    """Return the folder to write into, and the ranks as they share it."""
    if not in_memory:
        return folder, ranks
    memory = find_memory(folder)
    parted = ranks.of_folder(str(memory or ""))
    if memory is None or parted.has_blank:
        if ranks.is_main and not _said:
            warn(
                "no copies in memory: this job was not started by `rankwise run`, or its host has no /dev/shm; saving to disk"
            )
            _said.append(True)
        return folder, ranks
    return memory, parted


def _copy(slot: _Slot, boxes: Sequence[Box], flat: Flat) -> tuple[memoryview, str | None]:
    """Copy this rank's share to host memory; a problem is returned, as the others must hear of it first."""
    try:
        return slot.staging.copy(boxes, flat.tensors), None
    except Exception as error:  # noqa: BLE001 - no memory, or whatever the device says
        return memoryview(b""), f"can't copy the state to host memory: {type(error).__name__}: {error}"


def _begin(ranks: Ranks, folder: Path, place: Path, step: int, size: int, problem: str | None) -> tuple[Path, int]:  # fmt: skip
    """Let the first rank of each folder make one to write into; return it, and the checkpoint's serial.

    Raises:
        CheckpointError: It can't, or some rank has a problem; the same on every rank.
    """
    word: dict[str, Any] = {}
    if problem is not None:
        word = {"error": problem, "hint": None}
    elif ranks.is_main:
        word = _open(folder, place, step, size * len(ranks.members))
    words = ranks.control.exchange(word, what=f"checkpoint.save of step {step}")
    failed = next((rank for rank, one in enumerate(words) if "error" in one), None)
    if failed is not None:
        if "temporary" in word:
            remove_quietly(DISK, place / word["temporary"])
        raise CheckpointError(f"step {step} was not saved: {words[failed]['error']}", rank=failed, hint=words[failed]["hint"])  # fmt: skip
    return place / words[ranks.main]["temporary"], max(words[rank]["serial"] for rank in ranks.mains)


def _open(folder: Path, place: Path, step: int, size: int) -> dict[str, Any]:
    try:
        place.mkdir(parents=True, exist_ok=True)
        # Without locks (some network file systems) nobody knows whose the leftovers are: they stay.
        if lock.take(place):
            sweep(place, DISK)
        else:
            warn(
                f"{place} is on a file system without locks: a second job that writes there would not be noticed"
            )
        if place is not folder:
            check_space(place, size)
        temporary = name_temporary(place, step)
        DISK.make_folder(temporary)
        memory = find_memory(folder)
        serials = [next_serial(one) for one in (folder, memory) if one is not None]
        return {"temporary": temporary.name, "serial": max(serials)}
    except CheckpointError as error:
        return {"error": error.message, "hint": error.hint}
    except OSError as error:
        told = tell(error, f"can't write into {place}")
        return {"error": told.message, "hint": told.hint}


#: Whether it was said that there are no copies in memory.
_said: list[bool] = []


def _find_mesh(flat: Flat) -> dict[str, int]:
    for tensor in flat.tensors.values():
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            names = mesh.mesh_dim_names or [f"dim{dim}" for dim in range(mesh.ndim)]
            return {name: mesh.size(dim) for dim, name in enumerate(names)}
    return {}


def check() -> None:
    """Raise what went wrong with a save in the background: at the same call on every rank.

    Call it once a step; ``ctx.should_stop()`` does so too. It costs a microsecond and sends nothing. Without it the error
    comes at the next save.

    Raises:
        CheckpointError: A save in the background has failed.

    Collective: every rank must call this equally often.
    """
    for slot in _slots.values():
        saving = slot.last
        if saving is None or saving._is_told:
            continue
        told = saving._vote.begin_call()
        if told is None:
            # Without an agreement the store or a rank is gone: no need to stay in step with anybody.
            told = saving._vote.wait_settled(_VOTE_S) is not False
        if told or (saving._is_alone and saving.is_done):
            saving.wait()


def finish_saves(folder: Path) -> None:
    """Wait for a save into a folder that is still going on, and raise what went wrong with it."""
    slot = _slots.get(folder.resolve())
    if slot is not None and slot.last is not None and not slot.last._is_told:
        slot.last.wait()


def _finish_all() -> None:
    for folder in list(_slots):
        finish_saves(folder)
