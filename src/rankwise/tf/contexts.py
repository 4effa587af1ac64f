"""Where the program is: in a replica's function, or between the replicas."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, final

from rankwise.base.errors import UsageError
from rankwise.tf.values import all_gather_values, all_reduce_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rankwise.tf.strategy import Strategy


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
        self.inputs: Any = ()
        #: Frames of steps under way, and whose gradients these have added.
        self.stepping: list[tuple[Any, set[int]]] = []
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


#: The strategy at hand, and the replica's context inside of its ``run``; of each thread its own.
_frame: ContextVar[tuple[Strategy, ReplicaContext | None] | None] = ContextVar("frame", default=None)


def find_frame() -> tuple[Strategy, ReplicaContext | None] | None:
    """Return the strategy at hand, and the replica's context inside of its ``run``; None outside of any."""
    return _frame.get()


def find_replica() -> ReplicaContext | None:
    """Return the context of the replica whose function this is; None outside of any."""
    frame = _frame.get()
    return None if frame is None else frame[1]


@contextmanager
def entering(strategy: Strategy, replica: ReplicaContext | None = None) -> Iterator[None]:
    """Enter the context of a replica; without one, the cross-replica context."""
    token = _frame.set((strategy, replica))
    try:
        yield
    finally:
        _frame.reset(token)


def check_between_replicas(what: str) -> None:
    """Refuse what can't be called in a replica's function."""
    replica = find_replica()
    if replica is not None:
        raise UsageError(
            f"strategy.{what}() inside of a function that strategy.run() has called",
            rank=replica.strategy.rank,
            hint="call it outside; inside there are get_replica_context().all_reduce, all_gather and merge_call",
        )
