"""Save a training state: training stands still for a copy to host memory, and a folder appears when all of it is whole."""

from __future__ import annotations

import operator
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.agreeing import Agreement, Request, agree, begin, find_place
from rankwise.checkpoint.disk import REAL_DISK
from rankwise.checkpoint.manifest import Manifest
from rankwise.checkpoint.parts import Flat, PerRank, check_state
from rankwise.checkpoint.ranks import find_alone, find_ranks
from rankwise.checkpoint.retention import Keep
from rankwise.checkpoint.rng import RNG, RandomStates
from rankwise.checkpoint.staging import Staging, lay_out
from rankwise.checkpoint.writing import (
    Order,
    agree_on_call,
    carry_out,
    forget,
    part_with_others,
    report_work,
    warn,
)
from rankwise.runtime.context import find_current
from rankwise.runtime.stop_vote import StopVote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.checkpoint.disk import Disk
    from rankwise.checkpoint.shard import Box

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
        stall_s: Seconds that training was blocked.
    """

    step: int
    stall_s: float = 0.0
    _is_alone: bool = field(default=True, repr=False)
    _path: Path | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _is_reported: bool = field(default=False, repr=False)
    _vote: StopVote = field(default_factory=StopVote, repr=False)

    @property
    def is_done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete on the disk.

        Args:
            timeout_s: Seconds to wait; None: until it has ended, which has a bound of its own.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It could not be saved, or is not done in time.
        """
        if not self._done.wait(timeout_s):
            raise CheckpointError(
                f"step {self.step} is not saved after {timeout_s:g} s", hint="wait longer, or check the disk"
            )
        self._is_reported = True
        if self._error is not None:
            raise self._error
        assert self._path is not None  # noqa: S101 - done without an error
        return self._path


@final
@dataclass(slots=True, eq=False)
class _Slot:
    """What is kept between the saves into one folder."""

    staging: Staging = field(default_factory=Staging)
    agreement: Agreement = field(default_factory=Agreement)
    last: Saving | None = None
    spent: Order | None = None


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
    alone: bool = False,
) -> Saving:
    """Save a state as ``folder/step-N``, which appears when it is complete and never before.

    The state is a dict of parts: modules (wrapped or not), optimizers, whatever has ``state_dict()`` and
    ``load_state_dict()``, tensors and DTensors, numbers, strings and containers of them. What all ranks have a copy of
    is written once, the ranks sharing the work; shards are written by one of those that have them. A part whose plain
    values differ between ranks, and what stands in ``PerRank``, is kept for each rank.

    Args:
        folder: Where checkpoints are; shared by all hosts, the same text on every rank.
        state: The parts by name.
        step: The step, 0 or more.
        keep: Which older ones are kept; None: all but those of the same step.
        metrics: Numbers to judge it by, for ``keep``; rank 0's count. An empty dict: it is not judged, and never the
            best.
        background: Whether to return once the values are in host memory; there are never two saves at once. What fails
            then is raised by what you call next (``check``), at last by ``ctx.close()``; a script without ``init()``
            that ends before gets a line on standard error.
        memory: Whether to save into the host's memory, and not to the disk: the first thing that ``load`` looks at when
            the job is started again, as cheap as a copy, and gone with the job. Needs ``rankwise run``; elsewhere the
            disk is used. One copy is kept there.
        rng: Whether the states of the random generators are saved too, for each rank.
        pickle: Whether objects that are not plain data may be pickled.
        alone: Whether this rank saves without the others, as a job of one; what a worker has gathered from parameter
            servers.

    Returns:
        The save; without ``background`` it has ended.

    Raises:
        UsageError: The step or the folder differs between ranks, or is invalid.
        CheckpointError: Something can't be saved, the disk refused, or an earlier save in the background had failed;
            the same on every rank.
        CollectiveTimeoutError: Some rank did not call; names it.

    Collective: every rank, with the same parts; with ``alone`` this one only, which then is the only one that saves
        into the folder.
    """
    start, ranks = SYSTEM_CLOCK.monotonic(), find_alone() if alone else find_ranks()
    found, folder = str(folder), Path(folder).absolute()  # a thread must not follow a script that moves elsewhere
    check_state(state)
    finish_saves(folder)
    slot = _slots.setdefault(folder.resolve(), _Slot())
    if rng and RNG not in state:
        state = {**state, RNG: PerRank(RandomStates(), at_other_size="keep")}
    place, ranks = find_place(folder, ranks, in_memory=memory)
    request = Request(
        shown_folder=found, folder=folder, place=place, state=state, step=step, metrics=metrics, keep=keep, can_pickle=pickle,
    )  # fmt: skip
    flat, share = agree(ranks, slot.agreement, request)
    boxes = lay_out(share)
    data, problem = _copy(slot.staging, boxes, flat)
    temporary, serial = begin(
        ranks, slot.agreement, request, size=sum(box.size for box in boxes), problem=problem, disk=DISK
    )
    step = operator.index(step)  # of NumPy, perhaps
    saving = Saving(step, _is_alone=ranks.world_size == 1)
    manifest = Manifest(
        step=step,
        serial=serial,
        world_size=ranks.world_size,
        files=(),
        mesh=_find_mesh(flat),
        metrics={name: float(value) for name, value in (metrics or {}).items()},
        parts=tuple(state),
    )
    number = next(ranks.numbers)
    disk = report_work(DISK, ranks.store, f"{number}/beat/{ranks.rank}")
    order = Order(
        ranks=ranks,
        disk=disk,
        temporary=temporary,
        manifest=manifest,
        boxes=boxes,
        data=data,
        trees=flat.trees,
        rank_trees=flat.rank_trees,
        keep=keep if place is folder else Keep(last=1),
        number=number,
    )
    if slot.spent is not None:
        forget(slot.spent)  # every rank has agreed to this save, so it has heard how that one ended
    slot.last, slot.spent = saving, order
    begins = threading.Event()

    def run_after() -> None:
        # With something to do at once it would hold the interpreter's lock, and the caller wait for its turn.
        begins.wait()
        _run(saving, order)

    if background:
        ctx = find_current()
        if ctx is not None:
            ctx._attend(at_step=check, before_leaving=_finish_all)
        # Not a daemon: the interpreter waits for it, so that a script may end right after its last save.
        try:
            threading.Thread(target=run_after, name="rankwise-checkpoint").start()
        except RuntimeError:  # this process may have no more threads: the others are waiting, so save now
            _run(saving, order)
    else:
        _run(saving, order)
        saving.wait()
    saving.stall_s = SYSTEM_CLOCK.monotonic() - start
    begins.set()
    return saving


def _run(saving: Saving, order: Order) -> None:
    try:
        saving._path = carry_out(order)
    except Exception as error:  # noqa: BLE001 - told by whoever waits for it, on this rank
        saving._error = error
    except BaseException:
        # Ctrl-C in the foreground: the caller hears of it now, and the next save must not tell it again.
        saving._error = CheckpointError(f"step {saving.step} was not saved: it was interrupted")
        saving._is_reported = True
        raise
    finally:
        saving._done.set()
    if saving._error is not None and threading.current_thread() is not threading.main_thread():
        warn(f"on rank {order.ranks.rank}: {saving._error}")
        agree_on_call(order, saving._vote)
    part_with_others(order)


def _copy(staging: Staging, boxes: Sequence[Box], flat: Flat) -> tuple[memoryview, str | None]:
    """Copy this rank's share to host memory; a problem is returned, as the others must hear of it first."""
    try:
        return staging.copy(boxes, flat.tensors), None
    except Exception as error:  # noqa: BLE001 - no memory, or whatever the device says
        return memoryview(b""), f"can't copy the state to host memory: {type(error).__name__}: {error}"


def _find_mesh(flat: Flat) -> dict[str, int]:
    for tensor in flat.tensors.values():
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            names = mesh.mesh_dim_names or [f"dim{dim}" for dim in range(mesh.ndim)]
            return {name: mesh.size(dim) for dim, name in enumerate(names)}
    return {}


def check() -> None:
    """Raise the error of a save in the background: at the same call on every rank.

    Call it once a step; ``ctx.should_stop()`` does so too. It costs a microsecond and sends nothing. Without it the
    error comes at the next save.

    Raises:
        CheckpointError: A save in the background has failed.

    Collective: every rank must call this equally often.
    """
    for slot in _slots.values():
        saving = slot.last
        if saving is None or saving._is_reported:
            continue
        found = saving._vote.begin_call()
        if found is None:
            # Without an agreement the store or a rank is gone: no need to stay in step with anybody.
            found = saving._vote.wait_settled(_VOTE_S) is not False
        if found or (saving._is_alone and saving.is_done):
            saving.wait()


def finish_saves(folder: Path) -> None:
    """Wait for a save into a folder that is still going on, and raise what went wrong with it."""
    slot = _slots.get(folder.resolve())
    if slot is not None and slot.last is not None and not slot.last._is_reported:
        slot.last.wait()


def note_serial(folder: Path, serial: int) -> None:
    """Know of a checkpoint: the next one has a higher serial, also if the one that was loaded lay in a host's memory that is gone."""
    agreement = _slots.setdefault(folder.resolve(), _Slot()).agreement
    agreement.serial = max(agreement.serial, serial)


def _finish_all() -> None:
    for folder in list(_slots):
        finish_saves(folder)
