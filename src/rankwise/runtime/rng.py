"""Seeds that differ by rank, and yet come from one number."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a number of its own for each path below a seed: ``seed + rank`` would give two jobs the same streams.

    Args:
        seed: Any whole number.
        *path: For example a rank.

    Returns:
        0 to 2**63 - 1.
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_all(seed: int, *, accelerators: bool = True) -> None:
    """Seed Python's, torch's and, where it is loaded, NumPy's global generators.

    Args:
        seed: 0 to 2**63 - 1.
        accelerators: Whether torch's of all devices, and not of the CPU only, which takes a 70th of the time.
    """
    random.seed(seed)
    (torch if accelerators else torch.default_generator).manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
