"""Give every sample its own random numbers, from (seed, epoch, sample): augmentation is the same at any number of ranks and workers."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rankwise.runtime.rng import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_for(seed: int, *path: int | str) -> None:
    """Seed Python's, torch's (CPU) and, where it is loaded, NumPy's global generators for what stands at a path.

    Args:
        seed: The loader's seed.
        *path: For example ``"sample", epoch, index``.
    """
    number = derive_seed(seed, *path)
    random.seed(number)
    # Not torch.manual_seed: that goes to every accelerator too, and takes 70 times as long.
    torch.default_generator.manual_seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the global generators as they were before the block: what data loading draws must not change dropout."""
    python, own = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    theirs = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(own)
        if numpy is not None:
            numpy.random.set_state(theirs)
