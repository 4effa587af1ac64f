"""Samples are seeded from the first draw on, and nobody can tell that they were not before."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise
from rankwise.data.batches import Packing
from rankwise.data.map_reader import MapReader, MapWorkItem

if TYPE_CHECKING:
    from collections.abc import Callable

numpy = pytest.importorskip("numpy")

SOURCES: dict[str, Callable[[], float]] = {
    "python": random.random,
    "gauss": lambda: random.gauss(0.0, 1.0),
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(numpy.random.rand()),
    "normal": lambda: float(numpy.random.randn()),
}


class Sometimes:
    """Draws for some samples only, and counts how often it was asked."""

    def __init__(self, draw: Callable[[], float], first: int) -> None:
        self.draw, self.first, self.asked = draw, first, 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        return torch.tensor([float(index), self.draw() if index >= self.first else 0.0])


def read(dataset: Any, *, always_seeded: bool) -> list[Any]:
    reader = MapReader(dataset, Packing(), seed=3)
    reader._draws = always_seeded
    work_items = [MapWorkItem(epoch=1, indices=list(range(start, start + 4))) for start in range(0, 20, 4)]
    return [reader.__getitems__(work_item).batches[0].tolist() for work_item in work_items]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("first", [0, 10])
def test_the_first_draw_is_noticed_and_seeded(source: str, first: int) -> None:
    """Whichever generator a data set uses, from its first sample on or later: what it draws is what seeds would have given."""
    draw = SOURCES[source]
    assert read(Sometimes(draw, first), always_seeded=False) == read(Sometimes(draw, first), always_seeded=True)


@pytest.mark.parametrize("source", SOURCES)
def test_the_training_process_draws_on_as_if_nothing_was_read(source: str) -> None:
    """Reading in the training process leaves all generators where they were, also at the micro-batch that was read twice."""
    draw = SOURCES[source]

    def train(*, reads: bool) -> list[float]:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        drawn = [own() for own in SOURCES.values()]
        numpy.random.randn()  # the second of a pair: one that is left over may get lost
        if reads:
            loader = rankwise.DataLoader(Sometimes(draw, 11), global_batch=4, shuffle=False)
            assert len(list(loader)) == 5
        return drawn + [own() for own in SOURCES.values()]

    assert train(reads=True) == train(reads=False)


def test_a_data_set_that_draws_nothing_is_read_once() -> None:
    """Without a draw no sample is asked for twice; with draws only those of one micro-batch."""
    silent, noisy = Sometimes(random.random, 99), Sometimes(random.random, 10)
    read(silent, always_seeded=False)
    read(noisy, always_seeded=False)
    assert (silent.asked, noisy.asked) == (20, 24)
