"""Ranks that wait for each other, some in a call of rankwise's library, the others in a collective of torch's.

The library compares what ranks are about to do over a group of its own. So a rank that is alone in a call waits in that group, and the
others wait for it in theirs: two groups of the same members, where two collectives of torch's would meet in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.mismatch import Mismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.reader.scene import Op
    from rankwise.verdict.group_sequences import GroupSequence
    from rankwise.verdict.rank_state import RankState


def find_crossing(places: Sequence[tuple[RankState, Op | None, GroupSequence | None]]) -> Mismatch | None:
    """Return where ranks that wait for each other stand, as the mismatch that it is; None if it is not because of the library."""
    known = [
        (one, op, sequence) for one, op, sequence in places if op is not None and (sequence is not None or not op.group)
    ]
    others = [(op, sequence) for _, op, sequence in known if op.library_call is None and sequence is not None]
    is_met = len(known) == len(places) and 0 < len(others) < len(known)
    members = {sequence.ranks for _, _, sequence in known if sequence is not None}
    if not is_met or len(members) != 1 or len({id(sequence) for _, sequence in others}) != 1:
        return None
    op, sequence = others[0]
    sides = sorted(_group(known), key=lambda side: (len(side[0]), side[0]))
    return Mismatch(sequence=sequence, seq=op.seq, respect="op", sides=tuple(sides), is_through=False)


def _group(known: list[tuple[RankState, Op, GroupSequence | None]]) -> list[tuple[tuple[int, ...], Op]]:
    sides: dict[tuple[str, str | None], tuple[list[int], Op]] = {}
    for one, op, _ in known:
        sides.setdefault((op.library_call or op.name, op.site), ([], op))[0].append(one.rank)
    return [(tuple(sorted(ranks)), op) for ranks, op in sides.values()]
