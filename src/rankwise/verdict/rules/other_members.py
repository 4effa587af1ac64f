"""Ranks named different members for one new group, or not all of them made it: new_group is a collective of all (C10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.base.rank_names import name_ranks
from rankwise.verdict.finding import JobFinding
from rankwise.verdict.wording import join_clauses, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.evidence.reader.scene import RankFacts
    from rankwise.verdict.scene_view import SceneView

RULE = "other_members"
_FIX = (
    "call new_group on all ranks of the job, members or not, with the same lists in the same order, "
    "and keep the group that contains this rank"
)


def find(view: SceneView) -> Iterator[JobFinding]:
    """Yield the finding of groups that got the same number and other members."""
    named: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for facts in view.scene.ranks:
        for name, members in _numbered(facts).items():
            named.setdefault(name, {}).setdefault(members, []).append(facts.rank)
    for name in sorted(named, key=int):
        sides = named[name]
        # A rank that was not asked for a group still counts it, so that a number stands for one call.
        if len(sides) > 1:
            yield _make_finding(view, name, sides)
            return


def _numbered(facts: RankFacts) -> dict[str, tuple[int, ...]]:
    """Return the members of Gloo's groups that torch gave a number; "0" is the first group, of all ranks.

    A group named by a hash of its members was made without the others. NCCL's may be parts of one that was split.
    """
    if facts.evidence is None or facts.evidence.has_left:
        return {}
    return {
        name: tuple(sorted(group.ranks))
        for name, group in facts.evidence.groups.items()
        if name.isdecimal() and int(name) > 0 and group.backend == "gloo" and facts.rank in group.ranks
    }


def _make_finding(view: SceneView, name: str, sides: dict[tuple[int, ...], list[int]]) -> JobFinding:
    wrong = [members for members in sides if _is_contradicted(view, name, members)]
    blamed = wrong if len(wrong) < len(sides) and wrong else [*sides]
    culprits = tuple(sorted(rank for members in blamed for rank in sides[members]))
    ordered = sorted(sides.items(), key=lambda side: (side[0] not in blamed, len(side[1]), side[1]))
    ranks = tuple(sorted(rank for _, some in ordered for rank in some))
    clauses = [
        f"{name_ranks(some)} {'list' if len(some) > 1 else 'lists'} {list(members)}" for members, some in ordered
    ]
    waiting = [
        one
        for one in view.rank_states.values()
        if one.wait and one.rank in ranks and (one.rank not in culprits or culprits == ranks)
    ]
    where = _find_place(view, name, culprits) or _find_place(view, name, ranks)
    return JobFinding(
        kind="mismatch", certainty="proof", rule=RULE, culprits=culprits, class_id="C10", where=where, waiting=view.list_waiting(waiting),
        message=f"the ranks named different members for group {name}, at {shorten(where)}: {join_clauses(clauses)}",
        fix=_FIX, key=f"members of group {name}", doing="in a collective", since_s=view.since(waiting),
    )  # fmt: skip


def _is_contradicted(view: SceneView, name: str, members: tuple[int, ...]) -> bool:
    """Tell whether one of those who stand on a list has named another one, or none that holds it; not if it may be yet to come."""
    for rank in members:
        facts, rank_state = view.by_rank.get(rank), view.rank_states.get(rank)
        if facts is None or rank_state is None or facts.evidence is None or facts.evidence.has_left:
            continue
        has_come = rank_state.wait in {"call", "handle", "backward"} or facts.state == "ended"
        value = _numbered(facts).get(name)
        if (value is not None and value != members) or (value is None and has_come):
            return True
    return False


def _find_place(view: SceneView, name: str, ranks: tuple[int, ...]) -> str | None:
    for rank in ranks:
        for op in view.by_rank[rank].ops:
            if op.group == name and op.site:
                return op.site
    return next((view.rank_states[rank].where for rank in ranks if view.rank_states[rank].where), None)
