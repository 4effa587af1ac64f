"""What all strategies have: scope, run, reduce, gather, and data for each replica."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, cast, final
from weakref import WeakSet

import torch

from rankwise.base.errors import UsageError
from rankwise.parallel.model_check import hash_tensor
from rankwise.parallel.trees import list_tensors
from rankwise.runtime.collectives import broadcast_
from rankwise.runtime.context import RankContext, find_current
from rankwise.tf.contexts import Replica, check_between_replicas, entering, find_frame, find_replica
from rankwise.tf.datasets import (
    DistributedDataset,
    InputContext,
    InputOptions,
    collect_datasets,
    split_dataset,
)
from rankwise.tf.losses import refusing_local_means
from rankwise.tf.mirroring import Noted, list_parameters, listen, make_equal, noting, sum_gradients
from rankwise.tf.missing import explain_method
from rankwise.tf.values import all_gather_values, all_reduce_values, gather_values, reduce_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from rankwise.tf.resolvers import ClusterResolver


class Updates(ABC):
    """What a strategy does with gradients."""

    @abstractmethod
    def after_scope(self, noted: Noted) -> None:
        """Take over what was made under the scope."""

    def before_run(self) -> None:  # noqa: B027 - as a rule there is nothing to do
        """Bring the parameters up to date."""

    @abstractmethod
    def before_step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Make the gradients of an optimizer's parameters those of all replicas."""


@final
class SumOfReplicas(Updates):
    """Each replica has all parameters, and updates them by the sum of the gradients of all.

    If it ``is_central``, the first makes the step; others, without gradients, make none and take its parameters.
    """

    def __init__(self, num_replicas: int, rank: int, *, is_central: bool = False) -> None:
        self._num_replicas, self._rank, self._is_central = num_replicas, rank, is_central
        self._aggregated: WeakSet[Optimizer] = WeakSet()
        self._hooked: WeakSet[Optimizer] = WeakSet()
        self._num_steps = 0

    def after_scope(self, noted: Noted) -> None:
        """Give all replicas the first one's values."""
        if self._num_replicas > 1:
            make_equal(noted, self._rank)

    def before_step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Add the gradients, unless ``aggregate`` has."""
        if self._num_replicas == 1:
            return
        # Made under the scope or not: without this the first replica would update its parameters alone.
        if self._is_central and optimizer not in self._hooked:
            self._hooked.add(optimizer)
            optimizer.register_step_post_hook(_send_parameters)
        if optimizer in self._aggregated:
            self._aggregated.discard(optimizer)
        else:
            self._look_at_inputs()
            sum_gradients(parameters)
        for one in list_parameters(optimizer) if self._is_central and self._rank else ():
            one.grad = None

    def aggregate(self, optimizer: Optimizer) -> None:
        """Add the gradients now."""
        if self._num_replicas > 1:
            sum_gradients(list_parameters(optimizer))
        self._aggregated.add(optimizer)

    def _look_at_inputs(self) -> None:
        """Warn in the first step if all replicas have the same batch."""
        self._num_steps += 1
        replica, ctx = find_replica(), find_current()
        if self._num_steps > 1 or replica is None or ctx is None:
            return
        own = " ".join(hash_tensor(one) for one in list_tensors(replica.inputs) if one.dim())
        answers = ctx.control.exchange(own, what="the first optimizer.step()")
        if own and len(set(answers)) == 1 and self._rank == 0:
            warnings.warn(
                f"strategy.run() was given the same batch on all {self._num_replicas} replicas, and their gradients are added: split it by "
                "strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=GLOBAL_BATCH_SIZE))",
                stacklevel=2,
            )


def _send_parameters(optimizer: Optimizer, *_: Any) -> None:
    values = [one.detach() for one in list_parameters(optimizer)]
    broadcast_(values, name="the parameters after optimizer.step()")


class Strategy:
    """How a training is spread over replicas; made as one of its kinds.

    On torch each replica is a process. Values that differ between replicas are ordinary values in each; the methods
    that join them are called by all.

    Attributes:
        num_replicas_in_sync: How many replicas share a global batch.
        replica_id: Which of them this process is.
        cluster_resolver: Who is in the job; None where there is one replica.
        device: The device of this replica.
        rank: This process's rank in the job.
        updates: What is done with gradients.
    """

    def __init__(
        self,
        ctx: RankContext | None,
        updates: Updates,
        *,
        num_replicas: int,
        resolver: ClusterResolver | None = None,
        device: torch.device | None = None,
        pipelines: tuple[int, int] | None = None,
    ) -> None:
        self.num_replicas_in_sync, self.cluster_resolver, self.updates = num_replicas, resolver, updates
        self.rank = 0 if ctx is None else ctx.rank
        self.replica_id = self.rank if num_replicas > 1 else 0
        self.device = device or (ctx.device if ctx is not None else torch.device("cpu"))
        self._pipelines = pipelines or (num_replicas, self.replica_id)
        self._seen: set[object] = set()
        listen()

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to use in place of tf's methods that are not here."""
        raise explain_method(self, name)

    @property
    def is_spread(self) -> bool:
        """Whether several processes move the same parameters."""
        return max(self.num_replicas_in_sync, self._pipelines[0]) > 1

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Create model and optimizer in this block: parameters and buffers are on the replica's device, and equal on all replicas at its end.

        Raises:
            UsageError: Another strategy's scope is open, or a layer has no shape yet at the end.
            CollectiveError: The replicas have made different ones.

        Collective: every replica.
        """
        frame = find_frame()
        if frame is not None and frame[0] is not self:
            raise UsageError(
                f"{type(self).__name__}.scope() inside of the scope of another {type(frame[0]).__name__}", rank=self.rank,
                hint="one program has one strategy: leave the other scope first",
            )  # fmt: skip
        place = self.device if self.device.type != "cpu" else nullcontext()
        with noting(self) as noted, entering(self), place:
            yield
        self.updates.after_scope(noted)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,  # noqa: ARG002 - tf's signature
    ) -> Any:
        """Call a function as this replica; an ``optimizer.step()`` in it moves the parameters by the sum of all replicas' gradients.

        Args:
            fn: What each replica does.
            args: This replica's arguments.
            kwargs: The same, by name.
            options: Of no effect.

        Returns:
            What the function returned in this replica; ``reduce`` and ``gather`` join it with the others'.

        Raises:
            UsageError: This is a replica's function already; or a loss is a mean over its own samples, or a step
                updates what is not added up.

        Collective: every replica, if the function has a step or another collective in it.
        """
        check_between_replicas("run")
        self.updates.before_run()
        code = getattr(fn, "__code__", fn)
        is_new = self.num_replicas_in_sync > 1 and code not in self._seen
        self._seen.add(code)
        replica = Replica(self, [args, dict(kwargs or {})])
        with entering(self, replica), refusing_local_means(self.rank) if is_new else nullcontext():
            return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Add or average a value over the replicas.

        Args:
            reduce_op: ``ReduceOp.SUM`` or ``MEAN``, or their names. A value that is the same on all replicas is added
                as often as there are.
            value: What ``run`` has returned: nested containers of tensors and numbers.
            axis: A dim to reduce as well, whose size may differ between replicas; each row counts alike. None:
                elementwise.

        Returns:
            The result, on all replicas; without a gradient.

        Raises:
            UsageError: It is called in a replica's function, or a tensor has no such dim.
            CollectiveError: The replicas' values do not fit.

        Collective: every replica.
        """
        check_between_replicas("reduce")
        return reduce_values(reduce_op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """Join tensors of all replicas along a dim, whose size may differ between them.

        Args:
            value: What ``run`` has returned: nested containers of tensors with a dim at least.
            axis: The dim.

        Returns:
            The tensors, on all replicas; without a gradient.

        Raises:
            UsageError: It is called in a replica's function, or a tensor has no such dim.

        Collective: every replica.
        """
        check_between_replicas("gather")
        return gather_values(value, axis, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas: of one.

        Args:
            value: What ``run`` has returned.
        """
        return (value,)

    # ------------------------------------------------------------------------------ data

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Split global batches among the replicas, as tf does: consecutive rows for each, the last ones with fewer or none.

        Args:
            dataset: A torch ``DataLoader`` whose batch size is that of all replicas together; each replica reads its
                own samples only, in an order that all share. Or anything else that gives batches, the same on all
                replicas: each reads all, and cuts.
            options: How it is split, and where it goes.

        Returns:
            This replica's batches; a new pass reshuffles.

        Raises:
            UsageError: It gives single samples, or is split already.

        Collective: every replica.
        """
        if self._pipelines[0] > self.num_replicas_in_sync:
            raise UsageError(
                f"experimental_distribute_dataset() of a {type(self).__name__}, whose workers have no global batch", rank=self.rank,
                hint="coordinator.create_per_worker_dataset(function)",
            )  # fmt: skip
        chosen = options or InputOptions()
        return split_dataset(dataset, self.num_replicas_in_sync, self.replica_id, chosen, self.device)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Have each replica make its own batches; those whose data has ended get batches without rows until all have.

        Args:
            dataset_fn: Given an ``InputContext``, returns what gives batches of a replica's size. It must distribute
                the samples: ``range(context.input_pipeline_id, len(data), context.num_input_pipelines)``.
            options: Where batches go.

        Returns:
            This replica's batches.

        Raises:
            UsageError: The function returns single samples.

        Collective: every replica.
        """
        context = InputContext(*self._pipelines, self.num_replicas_in_sync)
        return collect_datasets(dataset_fn, context, options or InputOptions(), self.device)


@final
class ReplicaContext:
    """This replica, inside of a function that ``strategy.run`` calls; made by ``get_replica_context``.

    Attributes:
        strategy: Whose ``run`` it is.
        replica_id_in_sync_group: Which replica this is, from 0.
        num_replicas_in_sync: How many there are.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.replica_id_in_sync_group = strategy.replica_id
        self.num_replicas_in_sync = strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002 - tf's signature
        """Add or average a value over the replicas; gradients flow back to all of them.

        Args:
            reduce_op: ``ReduceOp.SUM`` or ``MEAN``.
            value: Nested containers of tensors and numbers, of equal shapes on all replicas.
            options: Of no effect.

        Returns:
            The result, on all replicas.

        Collective: every replica.
        """
        return all_reduce_values(reduce_op, value, self.num_replicas_in_sync)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:  # noqa: ARG002 - tf's signature
        """Join a value over the replicas along a dim, whose size may differ; gradients flow back.

        Args:
            value: Nested containers of tensors.
            axis: The dim.
            options: Of no effect.

        Returns:
            The result, on all replicas.

        Collective: every replica.
        """
        return all_gather_values(value, axis, self.num_replicas_in_sync)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` between the replicas, where ``strategy.reduce`` and ``gather`` may be called.

        Args:
            merge_fn: Called in each process, with its own values.
            args: What it is given after the strategy.
            kwargs: The same, by name.

        Returns:
            What it returns.

        Collective: every replica.
        """
        with entering(self.strategy):
            return merge_fn(self.strategy, *args, **(kwargs or {}))


#: What ``get_strategy`` returns outside of any scope: one replica, and nothing is shared.
_default: list[Strategy] = []


def get_strategy() -> Strategy:
    """Return the strategy whose scope or ``run`` this is; outside of any, one of a single replica."""
    frame = find_frame()
    if frame is not None and isinstance(frame[0], Strategy):
        return frame[0]
    if not _default:
        _default.append(Strategy(find_current(), SumOfReplicas(1, 0), num_replicas=1))
    return _default[0]


def has_strategy() -> bool:
    """Return whether this is a strategy's scope or ``run``."""
    return find_frame() is not None


def in_cross_replica_context() -> bool:
    """Return whether this is a strategy's scope, and no replica's function."""
    return has_strategy() and find_replica() is None


def get_replica_context() -> ReplicaContext | None:
    """Return this replica's context; None between the replicas, and outside of any strategy that of a single replica."""
    replica = find_replica()
    if replica is None:
        return None if has_strategy() else ReplicaContext(get_strategy())
    replica.context = replica.context or ReplicaContext(get_strategy())
    return cast("ReplicaContext", replica.context)


def aggregate_gradients(optimizer: Optimizer) -> None:
    """Add an optimizer's gradients over the replicas now, so that they can be clipped; its next ``step()`` takes them as they are.

    Args:
        optimizer: Over parameters that were made under the scope.

    Raises:
        UsageError: This is no replica's function, or its strategy has no sum of gradients.

    Collective: every replica.
    """
    updates = get_strategy().updates
    if find_replica() is None or not isinstance(updates, SumOfReplicas):
        raise UsageError(
            "aggregate_gradients() outside of a function that strategy.run() has called, or with parameter servers",
            hint="call it between backward() and step(), under a mirrored or central-storage strategy",
        )
    updates.aggregate(optimizer)
