"""The collectives of one group, side by side for all its ranks, by their number.

Groups are told apart by their members first: their names differ between ranks that made unequal numbers of groups. Each
rank's list may have holes (a ring keeps the last thousand; what C++ issued is seen only when the flight recorder is read), so an
operation that is not there proves nothing, and only two that are there can differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

from rankwise.base.rank_names import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwise.evidence.reader.scene import Op, Scene

#: Names under which torch knows the same collective.
_FAMILIES = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced", "allreduce", "allreduce_coalesced"),
    "all_gather": (
        "all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced", "allgather",
        "_allgather_base", "all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
    ),
    "reduce_scatter": (
        "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
    ),
    "all_to_all": ("all_to_all", "all_to_all_single", "alltoall", "alltoall_base"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier",),
}  # fmt: skip
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names}
#: All names of collectives and messages, as functions of torch.distributed bear them.
KNOWN_NAMES = frozenset({*_FAMILY_OF, "send", "recv", "isend", "irecv", "monitored_barrier"})
#: Made of messages: it has no number of its own.
UNNUMBERED = frozenset({"monitored_barrier"})
#: With fewer operations than this, nothing of a rank's past has fallen out of its ring or of what the flight recorder
#: shows.
WHOLE_BELOW = 200


def find_family(op: Op) -> str | None:
    """Return the collective that an operation is, whatever name it came by; None if it is none that ranks make in step."""
    return _FAMILY_OF.get(op.name)


def list_families(names: Iterable[str]) -> frozenset[str]:
    """Return the collectives among names of functions."""
    return frozenset(_FAMILY_OF[name] for name in names if name in _FAMILY_OF)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSequence:
    """One group.

    Attributes:
        ranks: Its members, ascending.
        label: What tells groups of the same members apart; empty where there is one.
        backends: As its ranks call it.
        ops: By rank, then by number.
        lasts: By rank, the highest of its numbers.
        forgotten: Ranks whose part may have fallen out of what is kept: what they made here is not known.
        lives: By rank, how often the numbers began anew: a group can be destroyed and made again by the same name.
    """

    ranks: tuple[int, ...]
    label: str
    backends: frozenset[str] = frozenset()
    ops: dict[int, dict[int, Op]] = field(default_factory=dict)
    lasts: dict[int, int] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)
    lives: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return f"{name_ranks(self.ranks)}{self.label}"

    @property
    def key(self) -> str:
        """Words that are equal on all ranks and at all moments, and tell it from all others."""
        return f"{name_ranks(self.ranks, None)}{self.label}"

    @property
    def is_gloo(self) -> bool:
        """Whether it is Gloo's for sure."""
        return self.backends == {"gloo"}

    def last(self, rank: int) -> int:
        """Return the highest number that a rank is known to have reached; 0 if none is known."""
        return self.lasts.get(rank, 0)

    def last_op(self, rank: int) -> Op | None:
        """Return what a rank made under that number; None if it is not known."""
        return self.ops.get(rank, {}).get(self.last(rank))

    def is_behind(self, rank: int, seq: int) -> bool:
        """Tell whether the records of a rank show that it has not come to a number."""
        return rank not in self.forgotten and self.last(rank) < seq

    def has_been_at(self, rank: int, site: str | None, before: float = math.inf) -> bool:
        """Tell whether a rank is known to have made a collective from a line, under a lower number than ``before``."""
        known = self.ops.get(rank, {})
        return site is not None and any(op.site == site for seq, op in known.items() if seq < before)

    def split_at(self, seq: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the members that are known to have come to a number, and the others."""
        came = tuple(rank for rank in self.ranks if seq in self.ops.get(rank, {}))
        return came, tuple(rank for rank in self.ranks if rank not in came)

    def remembers_all(self, rank: int) -> bool:
        """Tell whether what is known of a rank goes back to its first collective here, without holes."""
        known = self.ops.get(rank, {})
        return rank not in self.forgotten and len(known) == self.last(rank)


def find_sequences(scene: Scene) -> tuple[GroupSequence, ...]:
    """Lay out the collectives of all groups that the ranks know."""
    sequences: dict[tuple[tuple[int, ...], str], GroupSequence] = {}
    labels = _find_labels(scene)
    for facts in scene.ranks:
        evidence = facts.evidence
        if evidence is None:
            continue
        own: dict[str, GroupSequence] = {}
        for name, group in evidence.groups.items():
            if facts.rank not in group.ranks:
                continue
            key = (tuple(sorted(group.ranks)), labels[tuple(sorted(group.ranks))] and f" (group {name})")
            sequence = sequences.get(key) or GroupSequence(ranks=key[0], label=key[1])
            if group.backend not in sequence.backends:
                sequence = replace(sequence, backends=sequence.backends | {group.backend})
            sequences[key] = own[name] = sequence
        _fill(own, facts.rank, evidence.ops)
    return tuple(sequences.values())


def _find_labels(scene: Scene) -> dict[tuple[int, ...], str]:
    """Return for each list of members whether names must tell their groups apart: "by name", or nothing."""
    most: dict[tuple[int, ...], int] = {}
    for facts in scene.ranks:
        counts: dict[tuple[int, ...], int] = {}
        for group in facts.evidence.groups.values() if facts.evidence else ():
            members = tuple(sorted(group.ranks))
            counts[members] = counts.get(members, 0) + 1
        for members, count in counts.items():
            most[members] = max(most.get(members, 0), count)
    return {members: "by name" if count > 1 else "" for members, count in most.items()}


def _fill(sequences: Mapping[str, GroupSequence], rank: int, ops: Sequence[Op]) -> None:
    for op in ops:
        sequence = sequences.get(op.group)
        if sequence is None or op.is_message or op.name in UNNUMBERED or op.seq < 1:
            continue
        known = sequence.ops.setdefault(rank, {})
        if op.seq in known:
            # The number comes a second time: the group is a new one of the same name.
            known.clear()
            sequence.lasts[rank] = 0
            sequence.lives[rank] = sequence.lives.get(rank, 0) + 1
        known[op.seq] = op
        sequence.lasts[rank] = max(sequence.lasts.get(rank, 0), op.seq)
    if len(ops) >= WHOLE_BELOW:
        for sequence in sequences.values():
            if rank not in sequence.ops:
                sequence.forgotten.add(rank)
