"""Who this rank is, and with whom it speaks: what ``init()`` gives, and what everything else here asks."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist

from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.deadline import OverdueError, call_within
from rankwise.base.environ import get
from rankwise.base.errors import CollectiveError, RankwiseError, UsageError
from rankwise.base.faults import find_last_error, is_failure
from rankwise.base.log import get_logger
from rankwise.base.requeue import REQUEUE, ask_requeue
from rankwise.base.roles import RETURNS
from rankwise.runtime.batch import BatchPlan, plan_batch
from rankwise.runtime.leaving import destroy_groups, finish_background, keep_for_ever, leave_store
from rankwise.runtime.main_first import take_turns
from rankwise.runtime.rng import derive_seed, seed_all
from rankwise.runtime.signature import locate
from rankwise.runtime.stop_deadline import find_deadline
from rankwise.runtime.stopping import NOTICES, WISH, StopWatch, read_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import NoReturn

    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from rankwise.runtime.control import Control
    from rankwise.runtime.mesh import Mesh

_LOGGER = get_logger(__name__)

#: With work pending, torch's destroy waits for the timeout of that work, half an hour by default.
_DESTROY_S = 10.0
#: After an exception the others are likely to be in a collective that we will not join.
_ABANDON_S = 2.0


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankContext:
    """This rank's identity and its peers; as a context manager it leaves the job at the end of the block.

    Attributes:
        rank: Global rank, 0 to ``world_size - 1``.
        world_size: How many ranks the job has.
        local_rank: Rank among those of this host.
        local_world_size: How many ranks this host has.
        node_rank: Which host this is.
        num_nodes: How many hosts the job has.
        device: This rank's device; already the current one.
        backend: The backend of its tensors, as torch names it.
        timeout_s: Seconds that a collective may wait for the slowest rank.
        group: The process group of all ranks.
        control: The side channel on which ranks compare their calls.
        store: The job's store, under a prefix of its own.
        source: Where rank and world size come from.
        opened_at: ``file.py:LINE`` of the call of ``init()``.
        serves: Whether this process serves the store.
        role: This rank's role in a job whose ranks have roles, as in ``ps`` or ``worker``; None in any other.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    timeout_s: float
    group: dist.ProcessGroup = field(repr=False)
    control: Control = field(repr=False)
    store: dist.Store = field(repr=False)
    source: str
    opened_at: str = field(repr=False)
    serves: bool = field(default=False, repr=False)
    role: str | None = None
    _counts: dict[str, int] = field(default_factory=dict, repr=False)
    _stop: list[StopWatch] = field(default_factory=list, repr=False)
    _meshes: list[Mesh] = field(default_factory=list, repr=False)
    _lay_mesh: Callable[[RankContext, Mapping[str, int] | DeviceMesh], Mesh] | None = field(default=None, repr=False)
    _at_step: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _before_leaving: list[Callable[[], None]] = field(default_factory=list, repr=False)

    # ------------------------------------------------------------- who I am

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_rank == 0

    @property
    def is_open(self) -> bool:
        """Whether this rank is still in the job."""
        return self in _open

    @property
    def returns(self) -> bool:
        """Whether a rank that dies is restarted alone, while the others continue: in a job with roles, if its launcher says so."""
        return self.role is not None and get(RETURNS) != ""

    # --------------------------------------------------------------- the mesh

    def mesh(self, degrees: Mapping[str, int] | DeviceMesh | None = None, /, **of_axes: int) -> Mesh:
        """Lay the ranks out as a grid: ``ctx.mesh(replicate=2, shard=-1)``; or return the grid that was laid out.

        Along "replicate" and "shard" the ranks have different samples, along "tensor" and "pipeline" the same: loaders,
        samplers and metrics that are made from now on follow that.

        Args:
            degrees: How many ranks each axis has, one of which may be -1: the remaining ranks. Or torch's own mesh,
                with named axes. None, and no axis: none is laid out, and where there is none yet all ranks replicate.
            **of_axes: The same, as arguments.

        Returns:
            The mesh.

        Raises:
            UsageError: Degrees that don't make up the number of ranks; an unknown axis; or there is another mesh.
            CollectiveError: The ranks ask for different ones.

        Collective: every rank, with the same degrees; not if the mesh exists.
        """
        wanted = of_axes if degrees is None else degrees
        if self._meshes and not wanted:
            return self._meshes[0]
        if self._meshes:
            raise UsageError(
                f"this job has a mesh already: {dict(self._meshes[0].degrees)}",
                rank=self.rank,
                hint="create it once, right after init() or by init(mesh=...); ctx.mesh() without arguments returns it",
            )
        assert self._lay_mesh is not None  # noqa: S101 - given by init()
        self._meshes.append(self._lay_mesh(self, wanted or {"replicate": -1}))
        return self._meshes[0]

    @property
    def has_mesh(self) -> bool:
        """Whether the ranks were laid out as a grid."""
        return bool(self._meshes)

    @property
    def data_size(self) -> int:
        """Into how many shares a batch is split: without a mesh, one for each rank."""
        return self._meshes[0].data_size if self._meshes else self.world_size

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank has."""
        return self._meshes[0].data_rank if self._meshes else self.rank

    @property
    def data_ranks(self) -> Sequence[int]:
        """For each share of a batch the first rank that has it."""
        return self._meshes[0].data_ranks if self._meshes else range(self.world_size)

    # -------------------------------------------------------- small things

    def print(
        self, *values: object, sep: str = " ", end: str = "\n", flush: bool = True, all_ranks: bool = False
    ) -> None:
        """Print on rank 0; with ``all_ranks`` on each, prefixed with its rank, whole lines.

        Args:
            *values: As for ``print``.
            sep: As for ``print``.
            end: As for ``print``.
            flush: As for ``print``.
            all_ranks: Whether every rank prints.
        """
        if not (all_ranks or self.is_main):
            return
        text = sep.join(str(value) for value in values)
        if all_ranks:
            text = "\n".join(f"[rank {self.rank}] {line}" for line in text.split("\n"))
        # One write: the ranks share the terminal, and two would let another's line in between.
        sys.stdout.write(text + end)
        if flush:
            sys.stdout.flush()

    @contextmanager
    def main_first(self, *, per_node: bool = False, timeout_s: float | None = None) -> Iterator[None]:
        """Run a block on rank 0 first, then on the others: ``with ctx.main_first(): download()``.

        Args:
            per_node: The first rank of each host goes first, for what is on local disks.
            timeout_s: Seconds that the others wait; None: ``timeout_s`` of the context.

        Raises:
            CollectiveError: The first rank's block raised: the others don't wait, and name it.
            CollectiveTimeoutError: It had not finished in time.

        Collective: every rank must enter the block.
        """
        first = self.rank - self.local_rank if per_node else 0
        if self.world_size == 1:
            yield
            return
        key = f"turns/{self._count('turns')}/{first}"
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        with take_turns(self.store, key, is_first=self.rank == first, first=first, rank=self.rank, timeout_s=bound_s):
            yield

    def seed(self, seed: int, *, same: bool = False) -> int:
        """Seed Python, NumPy (if loaded) and torch, each rank differently: noise and dropout must not be copies.

        On a mesh, ranks of the tensor axis are seeded alike: they compute the same samples together.

        A model that is built after it differs between ranks until ``apply_ddp`` gives all of them rank 0's values.

        Args:
            seed: The job's seed, the same on all ranks.
            same: Seed all ranks alike, for what they must draw together, such as a split of the data.

        Returns:
            The number that this rank was seeded with.
        """
        stage = self._meshes[0].position["pipeline"] if self._meshes else 0
        # Without a mesh that is the rank; on one it numbers those that draw their own.
        own = derive_seed(seed, "all" if same else stage * self.data_size + self.data_rank)
        seed_all(own)
        return own

    def plan_batch(
        self, *, global_size: int | None = None, per_rank: int | None = None, micro_size: int | None = None
    ) -> BatchPlan:
        """Work out the batch sizes of this job, and print the effective global batch on rank 0.

        Args:
            global_size: Samples of one optimizer step over all ranks.
            per_rank: Or: samples of one optimizer step on each rank.
            micro_size: Samples that fit into one forward pass; None: all of a rank's.

        Returns:
            The plan.

        Raises:
            UsageError: The sizes contradict each other.
        """
        plan = plan_batch(self.data_size, global_size=global_size, per_rank=per_rank, micro_size=micro_size)
        self.print(plan)
        return plan

    def agree(self, value: Any, name: str, *, timeout_s: float | None = None) -> None:
        """Make sure that all ranks hold the same value: a length, a configuration, the checkpoint to resume from.

        Args:
            value: Anything whose ``repr`` distinguishes it from others.
            name: What it is, for the error.
            timeout_s: Seconds to wait for the slowest rank; None: ``timeout_s`` of the context.

        Raises:
            CollectiveError: They don't; says which rank holds what.
            CollectiveTimeoutError: Some rank did not arrive.

        Collective: every rank must call this.
        """
        what = f"agree on {name} at {locate()}"
        answers = self.control.compare(f"{name}={value!r}", what=what, timeout_s=timeout_s)
        if answers is not None:
            raise CollectiveError(
                f"the ranks do not agree on {name}: {self.control.describe(answers)}",
                rank=self.rank,
                hint="determine it on one rank and broadcast it, or find out why the hosts differ",
            )

    # -------------------------------------------------------- stopping early

    def should_stop(self) -> bool:
        """Return whether it is time to save and leave: the same answer on every rank, at the same step.

        Call it once a step, at the end. It costs about a microsecond and sends nothing. After SIGTERM or SIGUSR1 to any
        rank, or at a deadline (see ``listen_for_stop``), it returns True on all ranks at one agreed call, and from then
        on. The first call begins to listen; a script that never calls it is terminated by these signals as usual.

        In a job with parameter servers the calls of ranks don't correspond: each stops at its first call after the
        notice has reached it.

        Returns:
            Whether to stop. If so, save, and leave by ``leave_for_requeue()``.

        Raises:
            CollectiveTimeoutError: Some rank was dead or frozen, or never called this; names it.
            CollectiveError: There is a notice, and the job's store is gone.

        Collective: every rank must call this equally often, in the main thread.
        """
        if self not in _open:
            raise UsageError(
                "this process has left the job, or never joined it",
                rank=self.rank,
                hint="call should_stop() before ctx.close(), and not in a forked child",
            )
        if not self._stop:
            self.listen_for_stop()
        for check in self._at_step:
            check()
        if not self._stop[0].should_stop():
            return False
        if self._count("stops") == 1 and not self.stop_was_requested:
            ask_requeue()  # a script may leave by sys.exit(75) as well
        return True

    def listen_for_stop(
        self, *, after_s: float | None = None, margin_s: float = 120.0, signals: Iterable[str | int] = NOTICES
    ) -> None:
        """Listen for notices from now on, and not from the first ``should_stop()`` on.

        Call it right after ``init()`` if a notice may come before the end of the first step. Workers of a plain
        ``torch.utils.data.DataLoader`` that are forked from now on are not killed by a notice either.

        Args:
            after_s: Stop by yourself after so many seconds, whatever the scheduler allows.
            margin_s: Seconds that agreeing and saving take: that long before the time in SLURM_JOB_END_TIME (set by
                Slurm) or RANKWISE_DEADLINE (seconds since the epoch) the job stops; at most half of the time that is
                left.
            signals: The signals that are notices: names, numbers or ``signal.SIGTERM`` and the like.

        Raises:
            UsageError: It listens already, or a time or a signal is invalid.
        """
        if self._stop:
            raise UsageError(
                "this rank listens for notices already",
                rank=self.rank,
                hint="call listen_for_stop() once, before should_stop()",
            )
        numbers = read_signals(signals, self.rank)
        deadline = find_deadline(SYSTEM_CLOCK, after_s=after_s, margin_s=margin_s, rank=self.rank)
        self._stop.append(
            StopWatch(
                rank=self.rank, world_size=self.world_size, agrees=self.role is None and not self._counts.get("servers"), store=dist.PrefixStore(f"stop/{self._count('listening')}", self.store),
                timeout_s=self.timeout_s, deadline=deadline, signals=numbers, clock=SYSTEM_CLOCK,
            )
        )  # fmt: skip

    def request_stop(self, reason: str) -> None:
        """Have ``should_stop()`` return True on all ranks soon, at one agreed call: what one rank finds out is true for all.

        Nothing is waited for, and any rank may call it; of several reasons the first one counts. A job that stops by
        its own request need not be started again: leave it by ``close()``, not by ``leave_for_requeue()``.

        Args:
            reason: Why; ``stop_reason`` shows it on all ranks.
        """
        if not self._stop:
            self.listen_for_stop()
        self._stop[0].request(reason)

    @property
    def listens_for_stop(self) -> bool:
        """Whether notices are listened for."""
        return bool(self._stop)

    def forget_request(self) -> None:
        """Clear a request of ``request_stop()``, so that another training may begin; a scheduler's notice remains.

        Collective: every rank.
        """
        if not self._stop:
            return
        facts = (self._stop[0].was_asked, self._stop[0].has_notice)
        answers = self.control.exchange(facts, what="forgetting a request to stop")
        if any(asked for asked, _ in answers) and not any(noticed for _, noticed in answers):
            self._stop.pop().forget()
            self.listen_for_stop()

    @property
    def stop_was_requested(self) -> bool:
        """Whether it stops because a rank has called ``request_stop()``, and not on a notice."""
        return (self.stop_reason or "").startswith(WISH)

    @property
    def stop_reason(self) -> str | None:
        """Why ``should_stop()`` has returned True, as in ``SIGTERM on rank 3``; None before. The same on all ranks."""
        return self._stop[0].reason if self._stop else None

    def leave_for_requeue(self) -> NoReturn:
        """Leave the job and end the process with exit code 75 (``rankwise.REQUEUE``): it is to be started again.

        ``rankwise run`` does not count that as a failure; when all ranks have left so, its own exit code is 75.

        Returns:
            Never: it raises.

        Raises:
            SystemExit: Always, so that ``finally`` blocks run.

        Collective: every rank must call this, or end with exit code 0.
        """
        if self.is_main:
            why = f": {self.stop_reason}" if self.stop_reason else ""
            _LOGGER.info(f"leaving for a requeue, with exit code {REQUEUE}{why}")
        self.close()
        ask_requeue(leaves=True)
        raise SystemExit(REQUEUE)

    # --------------------------------------------------------------- leaving

    def _stop_without_agreement(self) -> None:
        """Let each rank stop at its next ``should_stop()``: ranks make unequal numbers of calls."""
        for watch in self._stop:
            watch.agrees = False

    def _attend(self, *, at_step: Callable[[], None], before_leaving: Callable[[], None]) -> None:
        """Have something called with each ``should_stop()``, and before the rank leaves; a second time nothing happens.

        Args:
            at_step: Called first in each ``should_stop()``; may raise, on all ranks at the same call.
            before_leaving: Waits for what goes on in the background; may raise a RankwiseError.
        """
        if at_step not in self._at_step:
            self._at_step.append(at_step)
            self._before_leaving.append(before_leaving)

    def close(self) -> None:
        """Leave the job: the process groups are destroyed, with a bound, and ``init()`` may be called again.

        A second call does nothing.
        """
        self._leave(_DESTROY_S)

    def __enter__(self) -> RankContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(_DESTROY_S if kind is None else _ABANDON_S, finishes=not is_failure(error))

    def _leave(self, bound_s: float, *, finishes: bool = True) -> None:
        if self not in _open:
            return
        troubles = finish_background(self._before_leaving) if finishes else []
        _open.remove(self)
        for watch in self._stop:
            watch.close()

        def destroy() -> None:
            is_patient = self.world_size > 1 and bound_s > _ABANDON_S
            destroy_groups(
                self.store, self.group, bound_s, awaited=self.world_size if is_patient and self.role is None else 0
            )
            self.control.close()
            object.__setattr__(self, "group", None)
            if is_patient:
                leave_store(self.store, self.world_size, serves=self.serves)

        try:
            call_within(bound_s, destroy)
        except OverdueError:
            _LOGGER.warning(
                f"[rank {self.rank}] left the job with a collective pending: its process group could not be closed within {bound_s:.0f} s"
            )
        # Told when we have left: what went wrong in the background must not stay there.
        if troubles:
            raise troubles[0]

    def _count(self, what: str) -> int:
        self._counts[what] = self._counts.get(what, 0) + 1
        return self._counts[what]


def _forget() -> None:
    """In a forked child: it has no part in the job, and must not end its parent's groups."""
    for context in _open:
        keep_for_ever(context.group, context.control._group)
    _open.clear()


_open: list[RankContext] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def enter(context: RankContext) -> RankContext:
    """Make a context the current one."""
    _open.append(context)
    return context


def leave_all() -> None:
    """Leave the job at the end of the process; what goes on in the background comes to its end, unless an exception ends the process."""
    finishes = not is_failure(find_last_error())
    while _open:
        with suppress(RankwiseError):  # of the background, where it was printed
            _open[-1]._leave(_ABANDON_S, finishes=finishes)


def find_current() -> RankContext | None:
    """Return the context that ``init()`` has opened in this process, or None."""
    return _open[-1] if _open else None


def current() -> RankContext:
    """Return the context that ``init()`` has opened in this process.

    Raises:
        UsageError: There is none.
    """
    context = find_current()
    if context is None:
        raise UsageError("this process has not joined a job", hint="call `ctx = rankwise.init()` first")
    return context
