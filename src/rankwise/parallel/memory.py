"""Memory: what a rank, a device or a unit of a model holds in training, and sizes as people write and read them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeVar

from rankwise.base.errors import UsageError

Held = TypeVar("Held", bound="Memory")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(size: str | int) -> int:
    """Return a number of bytes; "80GB", "80 GiB" and "80g" are the same: makers of GPUs say GB for 2**30."""
    if isinstance(size, int):
        number, unit = float(size), ""
    else:
        found = _SIZE.fullmatch(size.strip())
        if found is None:
            raise UsageError(f"{size!r} is not a size of memory", hint="use 80GB, 512MB, or a number of bytes")
        number, unit = float(found[1]), found[2].lower()
    if number <= 0:
        raise UsageError(f"a memory of {size!r} holds nothing", hint="use 80GB, 512MB, or a number of bytes")
    return int(number * _UNITS[unit])


def show_size(size: int) -> str:
    """Return bytes as people read them: ``1.4 GiB``."""
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is held in training, in bytes; in a plan by the rank that holds most.

    Attributes:
        parameters: The rank's own part of them.
        buffers: Those of the whole model: they are not sharded.
        gradients: The rank's own part.
        optimizer: The optimizer's states after its first step.
        communication: Under FSDP: the whole parameters outside of blocks, those of the two largest neighbouring blocks
            (one computes, the next is being fetched), and gradients before they are scattered. Under DDP: the largest
            gradient on its way into the bucket that holds it from then on. In a pipeline: the room for what all
            micro-batches receive, the last stage's outputs, and beside copies all gradients once more, as they are
            added up in one piece.
        activations: What autograd keeps when backward begins, and in a plan the gradient of the largest of it; None: no
            batch was given.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    communication: int = 0
    activations: int | None = None

    @property
    def total(self) -> int:
        """All of it: as if all were there at once, as it is when gradients of several micro-batches are added up."""
        return (
            self.parameters
            + self.buffers
            + self.gradients
            + self.optimizer
            + self.communication
            + (self.activations or 0)
        )

    def add(self: Held, other: Memory) -> Held:
        """Return the sums; activations that nobody has measured stay unknown."""
        known = [one for one in (self.activations, other.activations) if one is not None]
        names = ("parameters", "buffers", "gradients", "optimizer", "communication")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, activations=sum(known) if known else None, **sums)
