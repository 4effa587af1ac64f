"""Ranks that wait for each other, some in a call of rankwise's library, the others in a collective of torch's.

The library compares what ranks are about to do over a group of its own. So a rank that is alone in a call waits in that group, and the
others wait for it in theirs: two groups of the same members, where two collectives of torch's would meet in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.verdict.parting import Parting

if TYPE_CHECKING:
    from rankwise.evidence.facts import Op
    from rankwise.verdict.lanes import Lane
    from rankwise.verdict.standing import Standing
    from rankwise.verdict.view import View


def find_crossing(view: View) -> Parting | None:
    """Return where the ranks stand, as the parting that it is; None if they don't wait for each other, or not because of the library.

    Args:
        view: The scene.
    """
    standings = [view.standings[rank] for rank in view.deadlocked]
    places = [(one, one.op, view.lane_of(one.rank, one.op) if one.op else None) for one in standings]
    known = [
        (one, op, lane) for one, op, lane in places if op is not None and (lane is not None or not op.group)
    ]
    others = [(op, lane) for _, op, lane in known if op.library_call is None and lane is not None]
    is_met = len(known) == len(places) and 0 < len(others) < len(known)
    members = {lane.ranks for _, _, lane in known if lane is not None}
    if not is_met or len(members) != 1 or len({id(lane) for _, lane in others}) != 1:
        return None
    # Only fresh records tell that a rank has not reached what C++ issued.
    if not all(view.is_settled(one.rank) and view.is_fresh(one.rank) for one in standings):
        return None
    op, lane = others[0]
    sides = sorted(_group(known), key=lambda side: (len(side[0]), side[0]))
    return Parting(lane=lane, seq=op.seq, respect="op", sides=tuple(sides), is_through=False)


def _group(known: list[tuple[Standing, Op, Lane | None]]) -> list[tuple[tuple[int, ...], Op]]:
    sides: dict[tuple[str, str | None], tuple[list[int], Op]] = {}
    for one, op, _ in known:
        sides.setdefault((op.library_call or op.name, op.site), ([], op))[0].append(one.rank)
    return [(tuple(sorted(ranks)), op) for ranks, op in sides.values()]
