"""Variables on parameter servers, and a coordinator that schedules functions on workers: over ``rankwise.parameter_server``.

In tf, workers wait for graphs that the coordinator sends. Here all ranks run the same script: on servers and workers the first
``schedule`` (or ``join``, ``done``, ``fetch``) of the coordinator does the rank's part until the coordinator has ended, then it ends
the process. Scheduled functions are found by name, so they must be at the top level of the script.
"""

from __future__ import annotations

import atexit
import inspect
import io
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import nn

from rankwise.base.environ import get
from rankwise.base.errors import CollectiveError, UsageError
from rankwise.parallel.parameter_server import ParameterServer, parameter_server
from rankwise.parallel.servers.coordinator import Handle, PerWorker
from rankwise.parallel.servers.layout import SPLIT_BYTES
from rankwise.parallel.servers.listener import JobStore
from rankwise.parallel.servers.setup import check_num_ranks, wait_for_keys
from rankwise.parallel.servers.shard import pack
from rankwise.runtime.context import RankContext, current, find_current
from rankwise.runtime.joining import find_role
from rankwise.runtime.nested import flatten
from rankwise.runtime.rank_identity import identify
from rankwise.tf.contexts import entering
from rankwise.tf.mirrored_strategies import join
from rankwise.tf.mirroring import Noted, make_equal, refuse_lazy
from rankwise.tf.resolvers import ClusterResolver, find_resolver
from rankwise.tf.strategy import Strategy, Updates
from rankwise.tf.values import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer


#: The strategy of this process, for functions that come from the coordinator.
_strategies: list[ParameterServerStrategy] = []


@final
@dataclass(frozen=True, slots=True)
class MinSizePartitioner:
    """Spreads a parameter over the servers if it is large.

    Attributes:
        min_shard_bytes: Only parameters above this size are split.
        max_shards: 1: none is; else of no effect: there are as many parts as servers.
    """

    min_shard_bytes: int = SPLIT_BYTES
    max_shards: int = 0


@final
class ParameterServerStrategy(Strategy):
    """The first ranks hold the variables, the next one coordinates, the others compute; each gradient is applied as it arrives.

    Args:
        cluster_resolver: With tasks "ps", "chief" and "worker"; None: TF_CONFIG, or the ranks of a launcher:
            ``rankwise run --nproc-per-node 6 train.py`` has a server, a coordinator and four workers.
        variable_partitioner: Which variables are split; None: those above some MiB.
        scheduler: Makes a learning-rate schedule of a server's optimizer, one step for each update: tf has it in the
            optimizer.

    Raises:
        UsageError: There are too few ranks.

    There is no process group of all ranks: the death of a worker does not affect the others.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: MinSizePartitioner | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        if cluster_resolver is None and get("TF_CONFIG"):
            cluster_resolver = find_resolver(None, rank=0, world_size=1)
        ctx = join(cluster_resolver, ("ps", "chief", "worker"), role=_find_role(cluster_resolver))
        spec = {} if cluster_resolver is None else cluster_resolver.cluster_spec().as_dict()
        check_num_ranks(ctx, len(spec.get("ps", ())) or 1, coordinator=True)
        resolver = find_resolver(cluster_resolver, rank=ctx.rank, world_size=ctx.world_size)
        split = variable_partitioner or MinSizePartitioner()
        self._updates = _Served(
            len(spec["ps"]) if spec.get("ps") else None,
            None if split.max_shards == 1 else split.min_shard_bytes,
            scheduler,
        )
        pipelines = ctx.world_size, 0
        Strategy.__init__(self, ctx, self._updates, num_replicas=1, resolver=resolver, pipelines=pipelines)
        _strategies[:] = [self]

    @property
    def parameter_server(self) -> ParameterServer:
        """What is underneath; ``strategy.parameter_server.gather()`` has the optimizer's state for a checkpoint.

        Collective: every rank, the first time; the coordinator's methods ask for it.
        """
        ps = self._updates.connect()
        self._pipelines = (ps.num_workers, ps.worker_index or 0)
        return ps


def _find_role(resolver: ClusterResolver | None) -> str:
    """Return what this rank is: as the resolver or the launcher says, else the first one a server and the second the coordinator."""
    if resolver is not None and resolver.task_type is not None:
        return resolver.task_type
    identity, _ = identify(None, None, None, None)
    return find_role(identity) or ("ps", "chief", "worker")[min(identity.rank, 2)]


@final
class _Served(Updates):
    """Gradients go to the servers, and parameters come from there."""

    def __init__(
        self, num_servers: int | None, split_bytes: int | None, scheduler: Callable[[Optimizer], Any] | None
    ) -> None:
        self._num_servers, self._split_bytes, self._scheduler = num_servers, split_bytes, scheduler
        self._roots: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._ps: ParameterServer | None = None
        self._is_fresh = False

    def after_scope(self, noted: Noted) -> None:
        if self._ps is not None and (noted.tensors or noted.optimizers):
            raise UsageError(
                "model or optimizer made under strategy.scope() after the first function was scheduled",
                hint="make them before",
            )
        ctx = current()
        if ctx.role is None:
            make_equal(noted, ctx.rank)
        else:
            make_untrained_equal(noted, ctx)
        self._roots += [one for one in noted.roots if next(one.parameters(), None) is not None]
        self._optimizers += noted.optimizers

    def connect(self) -> ParameterServer:
        """Return the parameter server, made when it is first asked for."""
        if self._ps is not None:
            return self._ps
        if len(self._optimizers) != 1 or not self._roots:
            raise UsageError(
                f"{len(self._roots)} models with parameters and {len(self._optimizers)} optimizers were made under ParameterServerStrategy.scope()",
                rank=current().rank, hint="make the model and one optimizer there, before the first function is scheduled",
            )  # fmt: skip
        optimizer = self._optimizers[0]
        _refuse_schedule(optimizer)
        model = self._roots[0] if len(self._roots) == 1 else nn.ModuleList(self._roots)
        self._ps = parameter_server(
            model,
            _repeat(optimizer),
            servers=self._num_servers,
            mode="async",
            coordinator=True,
            split_bytes=self._split_bytes,
            scheduler=self._scheduler,
        )
        return self._ps

    def before_run(self) -> None:
        self.connect().pull()
        self._is_fresh = True

    def before_step(self, optimizer: Optimizer, _: Any = None) -> None:
        if optimizer is not self._optimizers[0] or not self._is_fresh:
            is_second = optimizer is self._optimizers[0]
            what = "a second optimizer.step()" if is_second else "step() of another optimizer"
            raise UsageError(
                f"{what} in one strategy.run() with parameter servers", rank=current().rank,
                hint="the servers have the optimizer that was made under the scope; one step for each run()",
            )  # fmt: skip
        _refuse_schedule(optimizer)
        self._is_fresh = False
        self.connect().push()


def make_untrained_equal(noted: Noted, ctx: RankContext) -> None:
    """Give all ranks rank 0's values of what is not trained, through the store: there is no process group.

    Raises:
        RendezvousError: Rank 0 did not arrive, or the store is gone; the rest as ``Strategy.scope``.
    """
    refuse_lazy(noted, ctx.rank)
    untrained = [one.detach() for one in noted.tensors.values() if not one.requires_grad]
    key = f"scope/{ctx._count('scopes')}"
    store = JobStore(ctx.store, ctx.rank)
    # Also if there are none: others may have some, and would wait. Or else this process takes the place of one that
    # died.
    if ctx.rank == 0 and not store.check([key]):
        store.set(key, pack([one.cpu() for one in untrained]).numpy().tobytes())
    if not untrained:
        return
    found = wait_for_keys(ctx, {0: key}, "reach the end of strategy.scope()")[0]
    values = torch.load(io.BytesIO(found), weights_only=True)
    if [one.shape for one in values] != [one.shape for one in untrained]:
        raise CollectiveError(
            f"{len(untrained)} buffers and frozen parameters were made under strategy.scope(), but others on rank 0", rank=ctx.rank,
            hint="build the same model on all ranks",
        )  # fmt: skip
    with torch.no_grad():
        for one, value in zip(untrained, values, strict=True):
            one.copy_(value)


def _refuse_schedule(optimizer: Optimizer) -> None:
    """Refuse a schedule that would change a rate by which nothing is updated; torch marks the step of an optimizer that has one."""
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise UsageError(
            "a learning-rate schedule of the optimizer with parameter servers: it would not reach the optimizers of the servers", rank=current().rank,
            hint="ParameterServerStrategy(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)) gives each of them one",
        )  # fmt: skip


def _repeat(optimizer: Optimizer) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return what makes such an optimizer of other parameters."""
    if len(optimizer.param_groups) > 1:
        raise UsageError(
            f"an optimizer of {len(optimizer.param_groups)} groups with parameter servers", rank=current().rank,
            hint="one group: servers hold parts of the parameters, without their names",
        )  # fmt: skip
    kind, known = type(optimizer), inspect.signature(type(optimizer).__init__).parameters
    group = optimizer.param_groups[0].items()
    options = {name: value for name, value in group if name in known and name != "params"}
    return lambda parameters: kind(parameters, **options)


@final
class RemoteValue:
    """What a scheduled function will have returned."""

    def __init__(self, coordinator: ClusterCoordinator, handle: Handle) -> None:
        self._coordinator, self._handle = coordinator, handle

    def fetch(self) -> Any:
        """Return it when it is there.

        Raises:
            RankFailedError: The function raised; has its traceback.
            CollectiveError: No worker is left.
        """
        return self._coordinator.fetch(self)

    def get(self) -> Any:
        """Return it, as ``fetch``."""
        return self.fetch()


@final
@dataclass(frozen=True, slots=True)
class _Make:
    """Makes on a worker what a function of the script makes there."""

    function: Any
    is_iterator: bool

    def __call__(self, *_: int) -> Any:
        made = self.function
        if not hasattr(made, "__iter__"):
            with entering(_strategies[0]):
                made = made()
        return iter(made) if self.is_iterator else made


@final
class PerWorkerIterator:
    """Stands for each worker's own iterator, as an argument of scheduled functions."""

    def __init__(self, made: PerWorker) -> None:
        self.made = made

    def __iter__(self) -> PerWorkerIterator:
        """Return itself."""
        return self

    def __next__(self) -> NoReturn:
        """Refuse: only workers have batches."""
        raise UsageError(
            "next() of a per-worker iterator on the coordinator, which has no batches",
            hint="pass the iterator to a scheduled function: coordinator.schedule(step_fn, args=(iterator,))",
        )


@final
class PerWorkerDataset:
    """Stands for each worker's own data set, as an argument of scheduled functions; ``iter()`` stands for a pass over it."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.made = PerWorker(_Make(function, is_iterator=False))

    def __iter__(self) -> PerWorkerIterator:
        """Return a stand-in for a new iterator on each worker."""
        return PerWorkerIterator(PerWorker(_Make(self._function, is_iterator=True)))


@final
class ClusterCoordinator:
    """Schedules functions on the workers of a ``ParameterServerStrategy``; a function whose worker is lost runs again on another.

    On servers and workers ``schedule``, ``join``, ``done`` and ``fetch`` do not return: they do the rank's part, and
    end the process.

    Args:
        strategy: Whose workers.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise UsageError(
                f"ClusterCoordinator of a {type(strategy).__name__}",
                hint="it schedules for ParameterServerStrategy",
            )
        self.strategy = strategy
        self._open: deque[Handle] = deque()
        self._is_watched = False

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Have a function called on some worker, and return at once.

        Args:
            fn: Of the script's top level.
            args: Plain values, tensors, and what ``create_per_worker_dataset`` or ``iter()`` of it returned.
            kwargs: The same, by name.

        Returns:
            What it will have returned.

        Raises:
            UsageError: The function can't be sent.
            RankFailedError: An earlier one raised; what had not begun is cancelled.
        """
        ps, named = self._coordinate(), dict(kwargs or {})
        given = [
            getattr(one, "made", one) if isinstance(one, (PerWorkerIterator, PerWorkerDataset)) else one
            for one in (*args, *named.values())
        ]
        handle = ps.schedule(call_scheduled, (fn, tuple(named), *given))
        while self._open and self._open[0].is_done:
            self._open.popleft()
        self._open.append(handle)
        return RemoteValue(self, handle)

    def join(self) -> None:
        """Wait until all scheduled functions are done, and bring the model here up to date.

        Raises:
            RankFailedError: A function raised; has its traceback.
            CollectiveError: No worker is left.
        """
        ps = self._coordinate()
        ps.join()
        ps.pull()

    def done(self) -> bool:
        """Return whether all that was scheduled is done."""
        self._coordinate()
        return all(one.is_done for one in self._open)

    def fetch(self, val: Any) -> Any:
        """Return the values of scheduled functions, when they are there.

        Args:
            val: A ``RemoteValue``, or nested containers of them.
        """
        ps = self._coordinate()
        if any(isinstance(leaf, RemoteValue) for _, leaf in flatten(val)):
            return map_leaves(val, lambda one: ps.fetch(one._handle) if isinstance(one, RemoteValue) else one)
        return val

    def create_per_worker_dataset(self, dataset_or_dataset_fn: Any) -> PerWorkerDataset:
        """Return a stand-in for a data set that each worker makes for itself.

        Args:
            dataset_or_dataset_fn: A function of the script's top level that returns what gives batches; it may call
                ``strategy.distribute_datasets_from_function``, which tells the worker's index. Or a data set that can
                be pickled.
        """
        return PerWorkerDataset(dataset_or_dataset_fn)

    def _coordinate(self) -> ParameterServer:
        ps = self.strategy.parameter_server
        if ps.is_coordinator:
            if not self._is_watched:
                self._is_watched = True
                atexit.register(_release, ps)
            return ps
        _ = ps.serve() if ps.is_server else ps.work()
        if current().stop_reason is not None:
            current().leave_for_requeue()
        current().close()
        sys.exit(0)


def _release(ps: ParameterServer) -> None:
    """At the end of a script that has not failed: let workers and servers end, as when the coordinator of tf goes."""
    ctx = find_current()
    if ctx is None or hasattr(sys, "last_value"):
        return
    ps.close()
    ctx.close()


def call_scheduled(function: Callable[..., Any], names: Sequence[str], *given: Any) -> Any:
    """Call what was scheduled, on a worker."""
    at = len(given) - len(names)
    with entering(_strategies[0]):
        return function(*given[:at], **dict(zip(names, given[at:], strict=True)))
