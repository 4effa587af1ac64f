"""A parameter server: some ranks hold the parameters and their optimizer, the others compute gradients.

    ctx = rankwise.init()
    ps = rankwise.parameter_server(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), servers=2)
    if ps.is_server:
        ps.serve()  # until the workers have ended
    else:
        for inputs, targets in batches:
            ps.pull()
            loss_fn(model(inputs), targets).backward()
            ps.push()
    ctx.close()

Under ``rankwise run --role-counts ps=2,worker=6 --max-restarts 10 train.py`` the ranks join without a group of all of them, and a rank that
dies is started again alone: a server from its last copy, for which the workers wait; a worker takes its place, while the others continue.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch.distributed as dist

from rankwise.base.errors import UsageError
from rankwise.base.faults import is_failure
from rankwise.base.host_memory import find_memory_folder
from rankwise.parallel.servers.coordinator import Coordinator, Handle, PerWorker, work
from rankwise.parallel.servers.embedding import find_tables
from rankwise.parallel.servers.layout import SPLIT_BYTES, name_states, spread
from rankwise.parallel.servers.listener import JobStore
from rankwise.parallel.servers.setup import Setup, count_servers
from rankwise.parallel.servers.shard import Rules, check_rules
from rankwise.runtime.context import RankContext, current
from rankwise.runtime.stopping import NOTICES, is_caught_by_native_code, read_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from rankwise.parallel.servers.serving import Server
    from rankwise.parallel.servers.worker import Worker

_Part = TypeVar("_Part")


def parameter_server(  # noqa: PLR0913 - most calls give few
    model: nn.Module,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    servers: int | None = None,
    mode: str = "sync",
    staleness: int | None = None,
    backup_workers: int = 0,
    clip_norm: float | None = None,
    table_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    split_bytes: int | None = SPLIT_BYTES,
    coordinator: bool = False,
    resume: torch.optim.Optimizer | None = None,
    num_updates: int = 0,
    recovery_folder: str | Path | None = None,
    save_every: int = 100,
    timeout_s: float | None = None,
) -> ParameterServer:
    """Make the first ranks servers of the model's parameters, and the others workers.

    Parameters that are trained are spread over the servers: whole tensors by size, and those above ``split_bytes`` as
        ranges. The
    values are the servers' from then on; frozen parameters and buffers (such as BatchNorm's) stay each worker's own, so
    build the model from one seed on all ranks.

    Args:
        model: The model, on the CPU on servers; on workers where it computes.
        optimizer: Makes the optimizer of one server's part, given its parameters (a range is a parameter of one
            dimension).
        servers: How many ranks are servers; None: what `rankwise run --role-counts ps=2,worker=6` says, or 1.
        mode: ``"sync"``: one update for the average of all workers' gradients; equal to one process with all their
            samples. ``"stale"``: the same averages, but a worker computes with parameters that are up to ``staleness``
            updates old, and waits no earlier. ``"async"``: each gradient is an update, at once.
        staleness: That bound, with ``mode="stale"``.
        backup_workers: With ``mode="sync"``: do not wait for this many of the slowest workers; what they send late is
            dropped and counted. Each server chooses by what has reached it.
        clip_norm: Clip by the norm of the whole model's gradient: of the average, which takes one server; or of each
            worker's gradient if ``mode="async"``.
        table_optimizer: The same for the rows of each ``ServedEmbedding`` in the model: one that takes sparse
            gradients, as SparseAdam, Adagrad or SGD; None: as ``optimizer``.
        scheduler: Makes a learning-rate schedule of a server's optimizer; one step for each update.
        split_bytes: See above; None: never, for update rules that look at whole tensors (Adafactor, LAMB, Muon).
        coordinator: Whether the first rank that is not a server schedules functions on the others: ``ps.schedule``,
            ``ps.join``, ``ps.fetch``; they run them in ``ps.work()``. Only with ``mode="async"``.
        resume: A plain optimizer of this model, whose states the servers continue with: of a checkpoint that was loaded
            into both.
        num_updates: How many updates were made before: where versions and the schedule begin.
        recovery_folder: Where servers copy what they hold, after each ``save_every`` updates. Where ranks are started
            again alone, one that dies is restarted from its last copy; the updates since are lost, except the last of
            each worker, which is sent again: with ``save_every=1`` none are. A start of the whole job begins with the
            model's values, not with copies: those of the previous run are renamed to ``shard-N.previous.pt``. Two jobs
            at once need a folder each. None: where ranks are started again alone, in the host's memory.
        save_every: See above.
        timeout_s: Seconds that the others wait for a worker, which is left out then; None: that of ``init()``.

    Returns:
        This rank's side of it.

    Raises:
        UsageError: The arguments contradict each other, or there are too few ranks.
        ModelError: The model has nothing to train.
        RendezvousError: A worker does not reach a server; names it.
        CollectiveError: A worker's model differs from the servers'.
        CheckpointError: A server can't write its first copy.

    Collective: every rank must call this, with the same arguments; afterwards no rank waits for all.
    """
    ctx = current()
    num_servers = count_servers(ctx, servers, coordinator=coordinator)
    ctx._stop_without_agreement()
    first, name = num_servers + coordinator, f"servers/{ctx._count('servers')}"
    workers = range(first, ctx.world_size)
    rules = Rules(
        mode=mode, staleness=staleness or 0, backup_workers=backup_workers, optimizer=optimizer, table_optimizer=table_optimizer or optimizer, scheduler=scheduler,
        clip_norm=clip_norm, timeout_s=ctx.timeout_s if timeout_s is None else timeout_s,
        recovery_folder=recovery_folder, save_every=save_every,
    )  # fmt: skip
    has_tables = bool(find_tables(model))
    check_rules(
        rules,
        staleness,
        num_servers=num_servers,
        num_workers=len(workers),
        coordinator=coordinator,
        has_tables=has_tables,
        rank=ctx.rank,
    )
    if recovery_folder is not None:
        rules = replace(rules, recovery_folder=f"{recovery_folder}/{name}")
    elif ctx.returns:
        rules = replace(rules, recovery_folder=find_memory_folder(name))
    layouts = spread(model, num_servers, split_bytes=split_bytes)
    setup = Setup(ctx, model, rules, JobStore(dist.PrefixStore(name, ctx.store), ctx.rank), layouts)
    if ctx.rank < num_servers:
        server = setup.make_server(name_states(model, resume) if resume is not None else {}, num_updates)
        return ParameterServer(ctx, workers, num_servers, rules, setup.store, server=server)
    worker = setup.make_worker()
    head = setup.make_coordinator(workers) if coordinator and ctx.rank == num_servers else None
    return ParameterServer(ctx, workers, num_servers, rules, setup.store, worker=worker, coordinator=head)


@final
class ParameterServer:
    """This rank's side of a parameter server; made by ``parameter_server``.

    Attributes:
        is_server: Whether this rank holds parameters.
        is_coordinator: Whether this rank schedules functions on the workers.
        num_servers: How many ranks hold parameters; they are the first ones.
        num_workers: How many ranks compute gradients.
        worker_index: Which worker this is, from 0; None on a server and on the coordinator.
    """

    def __init__(
        self,
        ctx: RankContext,
        workers: Sequence[int],
        num_servers: int,
        rules: Rules,
        store: dist.Store,
        *,
        server: Server | None = None,
        worker: Worker | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._ctx, self._rules, self._store = ctx, rules, store
        self._server, self._worker, self._coordinator = server, worker, coordinator
        self.is_server, self.is_coordinator = server is not None, coordinator is not None
        self.num_servers, self.num_workers = num_servers, len(workers)
        self.worker_index = workers.index(ctx.rank) if ctx.rank in workers else None
        if worker is not None:
            ctx._attend(at_step=lambda: None, before_leaving=self.close)

    def serve(self) -> dict[str, Any]:
        """Serve the parameters until all workers have ended, or are gone.

        SIGTERM and SIGUSR1 are notices from now on: the workers' ``should_stop()`` returns True, and this returns when
            they have ended.
        Then the server writes what it holds to ``recovery_folder``, if there is one, and the next start of the job
        continues from it.

        Returns:
            ``shards``: for each its ``version``, how many gradients were ``applied`` and ``dropped``, the histogram of
            their ``staleness``, and the workers ``expelled``; the workers that ``ended``, and those ``lost``, with the
            reason.

        Raises:
            UsageError: This rank is a worker.
            CollectiveError: All workers are gone, and none had ended.
            CheckpointError: A copy can't be written.
        """
        if self._server is None:
            raise UsageError(
                f"serve() on worker {self.worker_index}",
                rank=self._ctx.rank,
                hint="if ps.is_server: ps.serve()",
            )
        self._listen_for_stop()
        return self._server.serve(self._ctx.should_stop)

    def pull(self) -> int:
        """Fill the model with the servers' parameters, as new as the mode asks for.

        Returns:
            The version: how many updates are in them (the least of all servers').

        Raises:
            UsageError: This rank is a server.
            CollectiveTimeoutError: A server does not answer; names it.
            CollectiveError: A server is gone or has failed, or the others had waited too long for this worker.
        """
        return self._as_worker("pull").pull()

    def push(self, weight: float = 1.0) -> None:
        """Send the model's gradients to the servers, and set them to None.

        Args:
            weight: This worker's part in the average: the number of its samples, where workers have batches of
                different size and each averages its own loss.

        Raises:
            UsageError: This rank is a server, or has not pulled.
            CollectiveTimeoutError: A server accepts nothing; names it.
            CollectiveError: A server is gone.
        """
        self._as_worker("push").push(weight)

    def gather(self) -> torch.optim.Optimizer:
        """Fill the model with the servers' parameters, and return a plain optimizer over it that has their states.

        Both are what a training in one process would have, and are saved as such, by this worker alone:
        ``rankwise.checkpoint.save(folder, {"model": model, "optimizer": ps.gather()}, step=step, alone=True)``. In
        synchronous mode all parts are of one version: that with everything that this worker has pushed. Rows of served
        embeddings are not in it.

        Returns:
            The optimizer.

        Raises:
            UsageError: This rank is a server.
            CollectiveError: A server is gone.
        """
        return self._as_worker("gather").gather()

    def stats(self) -> list[dict[str, Any]]:
        """Return each server's report, as ``serve()`` does."""
        return self._as_worker("stats").fetch_stats()

    @property
    def num_lost(self) -> int:
        """How many gradients of this worker were lost with servers that died; what went to several is counted for each."""
        return 0 if self._worker is None else self._worker.num_lost

    # --------------------------------------------------------- coordinating

    def schedule(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> Handle:
        """Have a function called on some worker, and return at once.

        A function whose worker is lost is called again on another. What ``fetch`` returns has been computed once to its
        end; what a lost worker had pushed before stays pushed.

        Args:
            function: Of the script's top level, so that workers find it by name.
            args: Plain values, tensors, and what ``per_worker`` returned.

        Returns:
            A handle for ``fetch``.

        Raises:
            UsageError: This rank is not the coordinator, or the function can't be sent.
            RankFailedError: An earlier one raised; what had not begun is cancelled.
        """
        return self._as_coordinator("schedule").schedule(function, args)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all scheduled functions are done.

        Args:
            timeout_s: Seconds to wait; None: as long as functions end within the ``timeout_s`` of ``parameter_server``.

        Raises:
            RankFailedError: A function raised; has its traceback.
            CollectiveError: No worker is left.
            CollectiveTimeoutError: It is not done in time.
        """
        self._as_coordinator("join").join(timeout_s)

    def fetch(self, handle: Handle, timeout_s: float | None = None) -> Any:
        """Return what one function has returned, when it is done; raises as ``join`` does.

        Args:
            handle: What ``schedule`` has returned.
            timeout_s: As for ``join``.
        """
        return self._as_coordinator("fetch").fetch(handle, timeout_s)

    def per_worker(self, make: Callable[[int, int], Any]) -> PerWorker:
        """Return a stand-in for what each worker makes for itself when it first needs it, such as an iterator over its data.

        Args:
            make: Called on a worker with its index and the number of workers; of the script's top level.
        """
        self._as_coordinator("per_worker")
        return PerWorker(make)

    def work(self) -> int:
        """Run what the coordinator schedules, until it leaves.

        Returns:
            How many functions were called.

        Raises:
            UsageError: There is no coordinator, or this rank is not a worker.
            CollectiveError: The coordinator is gone.
        """
        first = self._ctx.world_size - self.num_workers
        if self.worker_index is None or first == self.num_servers:
            raise UsageError(
                "work() on a rank that no coordinator schedules functions on",
                rank=self._ctx.rank,
                hint="parameter_server(..., coordinator=True), and call it on workers",
            )
        self._listen_for_stop()
        return work(
            self._ctx.rank, self.worker_index, self.num_workers, store=self._store, timeout_s=2 * self._rules.timeout_s,
            waits=lambda: self._ctx.returns and not self._ctx.should_stop(),
        )  # fmt: skip

    def _listen_for_stop(self) -> None:
        # Elsewhere than in the main thread no signal can be taken.
        if not self._ctx.listens_for_stop and threading.current_thread() is threading.main_thread():
            numbers = read_signals(NOTICES, self._ctx.rank)
            self._ctx.listen_for_stop(signals=[one for one in numbers if not is_caught_by_native_code(one)])

    def close(self) -> None:
        """Tell the servers that this worker has ended, and workers that there is nothing more to do; leaving the job does it too.

        While an exception propagates (``finally: ps.close()``), the worker has not ended: for the servers it is lost
        then, and may be started again.
        """
        if self._coordinator is not None:
            self._coordinator.close()
        if self._worker is not None:
            is_stopped = self._ctx.stop_reason is not None
            self._worker.close(has_ended=not is_failure(sys.exc_info()[1]), is_stopped=is_stopped)

    def _as_coordinator(self, what: str) -> Coordinator:
        hint = "ask ps.is_coordinator first; parameter_server(..., coordinator=True) has one"
        return self._need(self._coordinator, f"{what}() on rank {self._ctx.rank}, which is not the coordinator", hint)

    def _as_worker(self, what: str) -> Worker:
        hint = "servers call ps.serve() and nothing else: ask ps.is_server first"
        worker = self._need(self._worker, f"{what}() on server {self._ctx.rank}", hint)
        if worker.is_closed:
            raise UsageError(
                f"{what}() after close()",
                rank=self._ctx.rank,
                hint="close() says that this worker has ended: call it after the last step",
            )
        return worker

    def _need(self, part: _Part | None, message: str, hint: str) -> _Part:
        if part is None:
            raise UsageError(message, rank=self._ctx.rank, hint=hint)
        return part
