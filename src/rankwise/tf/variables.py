"""A variable outside of models, such as a counter: what happens when replicas write it, and when somebody reads it."""

from __future__ import annotations

from enum import Enum
from typing import Any, final

import torch
from torch import Tensor, nn

from rankwise.base.errors import UsageError
from rankwise.runtime.collectives import broadcast
from rankwise.tf.contexts import find_replica
from rankwise.tf.missing import NamedMembers
from rankwise.tf.strategy import get_strategy
from rankwise.tf.values import reduce_values


class VariableSynchronization(Enum, metaclass=NamedMembers):
    """When a variable's values on the replicas are combined."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(Enum, metaclass=NamedMembers):
    """How a variable's values on the replicas are combined."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


@final
class Variable(nn.Module):  # type: ignore[misc]
    """A tensor that is a buffer of the model that it is an attribute of.

    ON_READ: each replica has its own value; reading it between the replicas aggregates. ON_WRITE (and AUTO): all have
        one value; what
    replicas assign is aggregated first.

    Args:
        initial_value: A tensor or a number; each replica begins with it, as in tf: with ON_READ and SUM their sum is
            read.
        trainable: Must be False: what is trained is an ``nn.Parameter``.
        name: Of no effect.
        dtype: In place of the value's.
        synchronization: When values are combined.
        aggregation: How.

    Raises:
        UsageError: It is to be trained.
    """

    value: Tensor

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = False,  # noqa: FBT001 - tf's signature
        *,
        name: str | None = None,
        dtype: torch.dtype | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        if trainable:
            raise UsageError("Variable(trainable=True)", hint="nn.Parameter, as an attribute of an nn.Module")
        nn.Module.__init__(self)
        self.name, self._strategy = name, get_strategy()
        self.is_on_read = synchronization is VariableSynchronization.ON_READ
        self.aggregation = aggregation
        start = torch.as_tensor(initial_value, dtype=dtype, device=self._strategy.device).clone()
        self.register_buffer("value", start)

    def assign(self, value: Any) -> Variable:
        """Write a value.

        In a replica's function with ON_WRITE the replicas' values are aggregated first. Between the replicas with
        ON_READ and SUM each gets its part.

        Args:
            value: Of the variable's shape.

        Returns:
            The variable.

        Raises:
            UsageError: Replicas write it, and it is not defined how their values are combined.

        Collective: every replica, in a replica's function with ON_WRITE.
        """
        value = torch.as_tensor(value, dtype=self.value.dtype, device=self.value.device).detach()
        if find_replica() is not None and not self.is_on_read:
            value = self._aggregate(value, "assigned")
        elif find_replica() is None and self.is_on_read and self.aggregation is VariableAggregation.SUM:
            is_first = self._strategy.replica_id == 0
            value = value / self._num_replicas if value.is_floating_point() else value * is_first
        with torch.no_grad():
            self.value.copy_(value)
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Add to the value; see ``assign``.

        Args:
            delta: Of the variable's shape, or a number.

        Returns:
            The variable.
        """
        delta = torch.as_tensor(delta, dtype=self.value.dtype, device=self.value.device).detach()
        if find_replica() is not None and not self.is_on_read:
            delta = self._aggregate(delta, "added to")
        elif find_replica() is None and self.is_on_read:
            return self.assign(self.read_value() + delta)
        with torch.no_grad():
            self.value.add_(delta)
        return self

    def assign_sub(self, delta: Any) -> Variable:
        """Subtract from the value; see ``assign``.

        Args:
            delta: Of the variable's shape, or a number.

        Returns:
            The variable.
        """
        return self.assign_add(-torch.as_tensor(delta, dtype=self.value.dtype, device=self.value.device))

    def read_value(self) -> Tensor:
        """Return the value: in a replica's function its own, between them with ON_READ that of all.

        Raises:
            UsageError: Replicas have own values, and it is not defined how they are combined.

        Collective: every replica, between the replicas with ON_READ.
        """
        if find_replica() is not None or not self.is_on_read:
            return self.value.clone()
        return self._aggregate(self.value, "read").clone()

    def numpy(self) -> Any:
        """Return the value, as ``read_value``, as a NumPy array."""
        return self.read_value().cpu().numpy()

    def __float__(self) -> float:
        """As ``read_value``, as a number."""
        return float(self.read_value())

    @property
    def _num_replicas(self) -> int:
        return self._strategy.num_replicas_in_sync

    def _aggregate(self, value: Tensor, what: str) -> Tensor:
        if self._num_replicas == 1:
            return value
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return broadcast(value)
        if self.aggregation is VariableAggregation.NONE:
            raise UsageError(
                f"a Variable with VariableAggregation.NONE is {what} where {self._num_replicas} replicas have values of their own", rank=self._strategy.rank,
                hint="Variable(..., aggregation=VariableAggregation.SUM), MEAN or ONLY_FIRST_REPLICA",
            )  # fmt: skip
        reduced = reduce_values(self.aggregation.value, value, None, self._num_replicas)
        return reduced.to(value.dtype)
