"""Where the program is: in a replica's function, or between the replicas."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

from rankwise.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer


class Updating(Protocol):
    """What adds the gradients of the replicas."""

    def before_step(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Make the gradients of an optimizer's parameters those of all replicas."""


class Owner(Protocol):
    """A ``Strategy``, as far as it is asked from below."""

    num_replicas_in_sync: int
    rank: int

    @property
    def is_spread(self) -> bool:
        """Whether several processes move the same parameters."""

    @property
    def updates(self) -> Updating:
        """What is done with gradients."""


@final
@dataclass(eq=False, slots=True)
class Replica:
    """A function that ``strategy.run`` has called: with what, and of its optimizers' steps under way the frame, and whose gradients each has added."""

    strategy: Owner
    inputs: Any
    stepping: list[tuple[Any, set[int]]] = field(default_factory=list)
    #: What ``get_replica_context`` has given for it.
    context: Any = None


#: The strategy at hand, and the replica's context inside of its ``run``; of each thread its own.
_frame: ContextVar[tuple[Owner, Replica | None] | None] = ContextVar("frame", default=None)


def find_frame() -> tuple[Owner, Replica | None] | None:
    """Return the strategy at hand, and the replica's context inside of its ``run``; None outside of any."""
    return _frame.get()


def find_replica() -> Replica | None:
    """Return the replica whose function this is; None outside of any."""
    frame = _frame.get()
    return None if frame is None else frame[1]


@contextmanager
def entering(strategy: Owner, replica: Replica | None = None) -> Iterator[None]:
    """Enter the context of a replica; without one, the cross-replica context."""
    token = _frame.set((strategy, replica))
    try:
        yield
    finally:
        _frame.reset(token)


def check_between_replicas(what: str) -> None:
    """Refuse what can't be called in a replica's function."""
    if (replica := find_replica()) is not None:
        raise UsageError(
            f"strategy.{what}() inside of a function that strategy.run() has called",
            rank=replica.strategy.rank,
            hint="call it outside; inside there are get_replica_context().all_reduce, all_gather and merge_call",
        )
