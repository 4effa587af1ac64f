"""Names of variables that are almost known ones: nobody reads them, and nobody says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.doctor.reading import Reading
from rankwise.doctor.variables.known import FAMILIES, IDENTITY, KNOWN
from rankwise.doctor.variables.real_names import ALSO_REAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Others' spellings of torchrun's names; they are only wrong where the right one is not set.
_ALIASES = {"MASTER_ADDRESS": "MASTER_ADDR", "CUDA_VISIBLE_DEVICE": "CUDA_VISIBLE_DEVICES", "WORLDSIZE": "WORLD_SIZE", "LOCALRANK": "LOCAL_RANK",
            "MASTERADDR": "MASTER_ADDR", "MASTERPORT": "MASTER_PORT", "PET_N_PROC_PER_NODE": "PET_NPROC_PER_NODE"}  # fmt: skip
_LONG = 10


def find_misspellings(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names that nobody reads, each with the name that is probably meant."""
    for name in sorted(env):
        meant = guess(name)
        if meant and meant not in env:
            yield name, meant


def guess(name: str) -> str:
    """Return the known name that a misspelt one is for; empty if it is none, or far from all."""
    if name in KNOWN or name in ALSO_REAL:
        return ""
    if name in _ALIASES:
        return _ALIASES[name]
    prefix = next((one for prefixes in FAMILIES.values() for one in prefixes if name.startswith(one)), "")
    if not prefix:
        return ""
    candidates = (known for known in KNOWN if known.startswith(prefix) and known not in IDENTITY)
    return next((known for known in candidates if _is_slip(name[len(prefix) :], known[len(prefix) :])), "")


def tell_misspellings(env: Mapping[str, str]) -> list[Reading]:
    """Return a warning for each name that is probably misspelt."""
    return [
        Reading(
            verdict="warn", what=f"{name} is set, which nothing reads; did you mean {meant}?", why=f"{meant} silently stays at its default",
            fix=f"unset {name}  # and set {meant}",
        )
        for name, meant in find_misspellings(env)
    ]  # fmt: skip


def _is_slip(told: str, known: str) -> bool:
    """Tell whether one is the other with a slip: an underscore too many, letters swapped, one lost, added or wrong."""
    if told.replace("_", "") == known.replace("_", ""):
        return True
    # Short names differ by a letter and are both real (NCCL_IB_TC, NCCL_IB_SL).
    if min(len(told), len(known)) < _LONG - 2 or abs(len(told) - len(known)) > 1:
        return False
    start = next(
        (n for n, (a, b) in enumerate(zip(told, known, strict=False)) if a != b), min(len(told), len(known))
    )
    rest, meant = told[start:], known[start:]
    if any(letter.isdigit() for letter in rest[:1] + meant[:1]):
        return False  # numbered names: _V2
    is_swapped = rest[:2] == meant[:2][::-1] and rest[2:] == meant[2:]
    return is_swapped or rest[1:] == meant[1:] or rest[1:] == meant or rest == meant[1:]
