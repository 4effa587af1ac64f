"""The states of the random generators as a part of the training state: a resumed run draws what it would have drawn."""

from __future__ import annotations

import random
import sys
from typing import Any, final

import torch

from rankwise.runtime.rng import derive_seed, seed_all

#: The part that they are kept in.
RNG = "rng"


@final
class RandomStates:
    """Python's, torch's (CPU and this rank's GPU) and, where it is loaded, NumPy's global generator."""

    def state_dict(self) -> dict[str, Any]:
        """Return their states."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": (version, torch.tensor(words), gauss),
            "torch": torch.get_rng_state(),
            "seed": torch.initial_seed() % 2**63,
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, *rest = numpy.random.get_state()
            state["numpy"] = (name, torch.tensor(keys.tolist()), *rest)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the states were taken."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        torch.set_rng_state(state["torch"].to("cpu", torch.uint8))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            name, keys, *rest = state["numpy"]
            numpy.random.set_state((name, keys.tolist(), *rest))


def reseed(state: dict[str, Any], *, step: int, rank: int, world_size: int) -> None:
    """At another world size there is no stream to go on with: seed each rank anew, by what was and where it stopped.

    Args:
        state: What rank 0 had.
        step: The step that is resumed.
        rank: Whose generators.
        world_size: How many ranks there are now.
    """
    seed_all(derive_seed(state["seed"], "resumed", step, world_size, rank))
