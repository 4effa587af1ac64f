"""Data that lies in memory as tensors: a batch is one indexing of each, and reading it draws no random numbers."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.data import Subset, TensorDataset, default_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


@final
class Table:
    """The rows of a ``TensorDataset``, all or some.

    Args:
        tensors: Each with the samples along its first dimension.
        rows: Which row each sample is; None: the sample's own number.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Tensor | None) -> None:
        self._tensors, self._rows = tuple(tensors), rows
        self._source = tensors

    def is_of(self, dataset: Any) -> bool:
        """Tell whether a data set's tensors are still these."""
        while type(dataset) is Subset:
            dataset = dataset.dataset
        return dataset.tensors is self._source

    def take(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the batch that ``default_collate`` would make of these samples.

        Args:
            indices: Of the samples.
        """
        # A third of the time of torch.tensor(), which looks at each number.
        chosen = torch.frombuffer(array("q", indices), dtype=torch.int64)
        if self._rows is not None:
            chosen = self._rows.index_select(0, chosen)
        return [tensor.index_select(0, chosen.to(tensor.device)) for tensor in self._tensors]


def find_table(dataset: Any, collate: Callable[..., Any]) -> Table | None:
    """Return the table that a data set is, or None: a class derived from torch's may do something else with a sample.

    Args:
        dataset: The user's.
        collate: How samples become a batch.
    """
    rows: Tensor | None = None
    while type(dataset) is Subset:
        try:
            outer = torch.as_tensor(dataset.indices, dtype=torch.long)
        except (TypeError, ValueError, RuntimeError):
            return None
        if outer.numel() and int(outer.min()) < 0:
            return None
        rows = outer if rows is None else outer[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or collate is not default_collate:
        return None
    # A sparse or nested tensor is indexed in its own way, and a gradient would be cut.
    if not all(
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.requires_grad
        and type(tensor) is torch.Tensor
        for tensor in dataset.tensors
    ):
        return None
    return Table(dataset.tensors, rows)
