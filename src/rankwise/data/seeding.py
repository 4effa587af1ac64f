"""Give every sample its own random numbers, from (seed, epoch, sample): augmentation is the same at any number of ranks and workers."""

from __future__ import annotations

import ctypes
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch

from rankwise.base.memory import view_memory
from rankwise.runtime.rng import derive_seed, seed_all

if TYPE_CHECKING:
    from collections.abc import Iterator


def seed_for(seed: int, *path: int | str) -> None:
    """Seed Python's, torch's (CPU) and, where it is loaded, NumPy's global generators for what stands at a path.

    Args:
        seed: The loader's seed.
        *path: For example ``"sample", epoch, index``.
    """
    seed_all(derive_seed(seed, *path), accelerators=False)


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


@final
class Traces:
    """Tells whether somebody draws from the global generators from now on, and can take that back; a tenth of what seeding takes."""

    def __init__(self) -> None:
        self._python, self._torch = random.getstate(), torch.default_generator.get_state()
        self._numpy = _copy_numpy_state()

    def are_there(self) -> bool:
        """Whether a number was drawn."""
        now = random.getstate()
        # The place in the block of random words, and the block's first word: no need to compare hundreds of them.
        is_same = now[1][-1] == self._python[1][-1] and now[1][0] == self._python[1][0]
        return not (
            is_same
            and now[2] == self._python[2]
            and torch.equal(torch.default_generator.get_state(), self._torch)
            and _copy_numpy_state() == self._numpy
        )

    def remove(self) -> None:
        """Let the generators be as they were."""
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        address = _find_numpy_state()
        if address is not None and self._numpy is not None:
            ctypes.memmove(address, self._numpy, _NUMPY_STATE_BYTES)
            # NumPy draws normal numbers in pairs, and keeps the second elsewhere: what was drawn here must not come
            # later. If there was one before, it is gone: looking at each micro-batch would take longer than all the
            # rest.
            numpy = sys.modules["numpy"]
            numpy.random.set_state({**numpy.random.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


#: NumPy's Mersenne Twister: 624 words of 32 bits, and the place among them.
_NUMPY_STATE_BYTES = 625 * 4


def _find_numpy_state() -> int | None:
    """Return where NumPy's global generator keeps its state: through NumPy's door for C programs, as copying takes 50 us by the other."""
    find = getattr(getattr(sys.modules.get("numpy"), "random", None), "get_bit_generator", None)  # since 1.24
    if find is None:
        return None
    generator = find()
    return generator.ctypes.state_address if type(generator).__name__ == "MT19937" else None


def _copy_numpy_state() -> bytes | None:
    address = _find_numpy_state()
    return None if address is None else bytes(view_memory(address, _NUMPY_STATE_BYTES))
