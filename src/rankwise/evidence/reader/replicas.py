"""What a rank has told of models that are trained as replicas: checksums of their parameters at some steps. Plain facts, kept packed."""

from __future__ import annotations

import base64
import functools
import json
import struct
from dataclasses import dataclass
from typing import Literal, final

from rankwise.evidence.reader.size_limits import inflate

#: What the names of all parameters may take.
_MOST_BYTES = 64 << 20


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Checksums of all parameters at one moment.

    Attributes:
        step: After how many steps of the optimizer.
        seq: How many collectives the model's group had made: equal on ranks that are at the same place of their
            program.
        sums: One number for each parameter, packed; equal for equal bits.
        samples: The bits of one element of each, packed.
        forwarded: Whether the wrapper was ever called.
        synced: False if ``no_sync`` was used lately, and the last forward of the wrapper was in it, as far as that can
            be told.
        rates: The learning rates, where they are plain numbers.
        order: Its number among all digests of this rank.
        is_last: Whether it was taken when the script let go of its process groups, or ended, without an exception.
    """

    step: int
    seq: int
    sums: str
    samples: str
    forwarded: bool = True
    synced: bool = True
    rates: tuple[float, ...] = ()
    order: int = 0
    is_last: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A model on one rank, as one optimizer changes it.

    Attributes:
        kind: "ddp": in DistributedDataParallel. "plain": in no wrapper, though data is dealt out to all ranks.
        members: The global ranks that are to hold the same.
        model: Its number among the models that were wrapped for these members.
        optimizer: The number of the optimizer among those that change this model.
        form: Equal for equal names, shapes and types.
        site: The user's line that has wrapped it.
        names: Of the parameters, packed.
        states: A letter for each parameter, for what the wrapper knows of it: known, added later, unfrozen later, moved
            later.
        kinds: A letter for each, for how the bits of an element are to be read.
        largest: Elements of the largest parameter.
        elements: Of all parameters together; 0 if unknown.
        is_hooked: Whether gradients are sent in a way of which nobody knows that all ranks end up with the same.
        machine: What decides how numbers are rounded there.
        moments: Step, ``seq`` and a checksum over all parameters, of many digests, oldest first.
        digests: The first and the last ones. That of the end, after some step, is no moment.
    """

    kind: Literal["ddp", "plain"]
    members: tuple[int, ...]
    model: int
    optimizer: int
    form: int
    site: str = ""
    names: str = ""
    states: str = ""
    kinds: str = ""
    largest: int = 0
    elements: int = 0
    is_hooked: bool = False
    machine: str = ""
    moments: tuple[tuple[int, int, int], ...] = ()
    digests: tuple[Digest, ...] = ()

    @property
    def last(self) -> Digest | None:
        """The digest of the end; None if it was not taken."""
        return next((one for one in self.digests if one.is_last), None)


def list_names(replica: Replica) -> tuple[str, ...]:
    """Return the names of its parameters."""
    return tuple(json.loads(inflate(base64.b64decode(replica.names), _MOST_BYTES)))


def list_sums(digest: Digest) -> tuple[int, ...]:
    """Return the checksums of a digest."""
    return _unpack(digest.sums)


def read_sample(replica: Replica, digest: Digest, place: int) -> float | None:
    """Return the element of a parameter that a digest holds as it is; None where it is no floating-point number."""
    raw = base64.b64decode(digest.samples)[4 * place : 4 * place + 4]
    kind = replica.kinds[place : place + 1]
    if len(raw) < 4 or kind not in {"f", "d", "e", "b"}:
        return None
    if kind == "e":
        return float(struct.unpack("<e", raw[2:])[0])
    if kind == "d":
        return float(struct.unpack("<d", bytes(4) + raw)[0])
    # A bfloat16 is the upper half of a float32; it stands in the upper bytes already.
    return float(struct.unpack("<f", raw if kind == "f" else bytes(2) + raw[2:])[0])


@functools.lru_cache(maxsize=4096)
def _unpack(text: str) -> tuple[int, ...]:
    raw = base64.b64decode(text)
    return struct.unpack(f"<{len(raw) // 4}I", raw)
