"""Data sets that are streams: they have no indices, so no sampler can split them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.lint.model.values import Instance, Object
from rankwise.lint.topics.data_flow import ITERABLE

if TYPE_CHECKING:
    from rankwise.lint.model.calls import Call
    from rankwise.lint.model.values import Value

HF_STREAM = "datasets.IterableDataset"


def is_stream(dataset: Value) -> bool:
    """Whether it is a stream of a class of the user's."""
    return isinstance(dataset.thing, Instance) and ITERABLE in dataset.thing.cls.library_bases()


def hf_stream(dataset: Value) -> Call | None:
    """The call of `load_dataset(..., streaming=True)` that a data set comes from, if nothing has split it since."""
    thing = dataset.thing
    return thing.call if isinstance(thing, Object) and thing.kind == HF_STREAM else None
