"""Models that should be the same on all ranks and are not: which parameters differ, between whom, since which step. Pure functions."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.evidence.replicas import list_names, list_sums, read_sample
from rankwise.verdict.case import name_ranks
from rankwise.verdict.words import is_buffers, is_gradient, is_wrapping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.evidence.facts import Evidence, Op, Scene
    from rankwise.evidence.replicas import Digest, Replica

_Moment = tuple[int, int]
#: Between different machines numbers are rounded otherwise, so only so large a difference, of the larger number, is one.
_ROUNDED = 1e-2
#: How exact the numbers of a type are.
_EXACTNESS = {"f": 1.2e-7, "d": 2.3e-16, "e": 9.8e-4, "b": 7.9e-3}
_MOST_NAMED = 3
#: Records of one rank of which the oldest may be gone.
_MANY_RECORDS = 1000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Replicas of a model that differ.

    Attributes:
        by_rank: The model on each rank that can be seen.
        evidence: What each of these ranks has recorded.
        digests: Of the last moment that all of them have told of.
        places: The parameters that differ, by their number.
        equal_step: After which step they were equal for the last time; None if they never were.
        step: After which step they first differed; 0 before the first one.
        is_over: Whether all of these ranks have ended.
        seqs: How many collectives the model's group had made at the digest before the last one, and at the last one.
    """

    by_rank: Mapping[int, Replica]
    evidence: Mapping[int, Evidence]
    digests: Mapping[int, Digest]
    places: tuple[int, ...]
    equal_step: int | None
    step: int
    is_over: bool
    seqs: tuple[int, int]

    @property
    def replica(self) -> Replica:
        """The model as the first rank tells of it."""
        return next(iter(self.by_rank.values()))

    @property
    def last_step(self) -> int:
        """After how many steps they were compared last."""
        return next(iter(self.digests.values())).step

    @property
    def camps(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same, the most first."""
        held: dict[tuple[int, ...], list[int]] = {}
        for rank, digest in self.digests.items():
            sums = list_sums(digest)
            held.setdefault(tuple(sums[place] for place in self.places), []).append(rank)
        return tuple(sorted(map(tuple, held.values()), key=lambda camp: (-len(camp), camp)))

    @property
    def culprits(self) -> tuple[int, ...]:
        """Who differs from most; all, where there is no most."""
        most, *others = self.camps
        chosen = others if 2 * len(most) > len(self.digests) else (most, *others)
        return tuple(sorted(rank for camp in chosen for rank in camp))


def find_drifts(scene: Scene, kind: str) -> tuple[Drift, ...]:
    """Return the models whose replicas differ at two steps in a row, or at the last one of a job that is over.

    Only digests of the same step are compared, and only if the ranks had made as many collectives by then: ranks that have
    legally made other numbers of steps are not compared at all.

    Args:
        scene: All that is known of the ranks.
        kind: Of the replicas.
    """
    groups: dict[tuple[object, ...], dict[int, Replica]] = {}
    for facts in scene.ranks:
        for replica in facts.evidence.replicas if facts.evidence is not None else ():
            if replica.kind == kind and facts.rank in replica.members:
                key = (replica.members, replica.model, replica.optimizer, replica.form)
                groups.setdefault(key, {})[facts.rank] = replica
    over = {facts.rank for facts in scene.ranks if facts.state == "ended"}
    evidence = {facts.rank: facts.evidence for facts in scene.ranks if facts.evidence is not None}
    found = (_compare(by_rank, evidence, is_over=by_rank.keys() <= over) for by_rank in groups.values())
    return tuple(drift for drift in found if drift is not None)


def _compare(
    by_rank: Mapping[int, Replica], evidence: Mapping[int, Evidence], *, is_over: bool
) -> Drift | None:
    if len(by_rank) < 2 or any(replica.is_hooked for replica in by_rank.values()):
        return None
    told = [{(step, seq): total for step, seq, total in replica.moments} for replica in by_rank.values()]
    totals = {moment: {one[moment] for one in told} for moment in _find_common(told)}
    if not any(len(found) > 1 for found in totals.values()):
        return None
    of_rank = {
        rank: {(one.step, one.seq): one for one in replica.digests} for rank, replica in by_rank.items()
    }
    digests = {
        moment: {rank: known[moment] for rank, known in of_rank.items()}
        for moment in _find_common([*of_rank.values()])
    }
    apart = {moment: _find_apart(by_rank, held) for moment, held in digests.items()}
    chosen = _choose(apart, is_over=is_over)
    if chosen is None:
        return None
    moment, places = chosen
    step, equal_step = moment[0], None
    for (earlier, _), found in sorted(totals.items(), reverse=True):
        if earlier > moment[0]:
            continue
        if len(found) == 1:
            equal_step = earlier
            break
        step = earlier
    return Drift(
        by_rank=by_rank,
        evidence={rank: evidence[rank] for rank in by_rank},
        digests=digests[moment],
        places=tuple(sorted(places)),
        equal_step=equal_step,
        step=step,
        is_over=is_over,
        seqs=(max((one for one in digests if one < moment), default=(0, 0))[1], moment[1]),
    )


def _find_common(lists: Sequence[Mapping[_Moment, object]]) -> list[_Moment]:
    return sorted(set(lists[0]).intersection(*lists[1:]))


def _find_apart(by_rank: Mapping[int, Replica], told: Mapping[int, Digest]) -> set[int]:
    """Return the parameters that differ at one moment."""
    columns = enumerate(zip(*(list_sums(digest) for digest in told.values()), strict=True))
    apart = {place for place, sums in columns if len(set(sums)) > 1}
    if len({replica.machine for replica in by_rank.values()}) > 1:
        apart = {place for place in apart if (_measure(by_rank, told, place) or 0.0) > _ROUNDED}
    return apart


def _measure(by_rank: Mapping[int, Replica], told: Mapping[int, Digest], place: int) -> float | None:
    """Return by how much of the larger one the sampled elements of a parameter differ; None if they can't be read."""
    values = [read_sample(by_rank[rank], digest, place) for rank, digest in told.items()]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if any(map(math.isnan, known)):
        return 0.0 if all(map(math.isnan, known)) else math.inf
    largest = max(map(abs, known))
    return (max(known) - min(known)) / largest if largest else 0.0


def _choose(apart: Mapping[_Moment, set[int]], *, is_over: bool) -> tuple[_Moment, set[int]] | None:
    """Return the last moment at which, as at the step before, some parameters differ; None if all were equal later."""
    moments = sorted(apart)
    if not moments or not apart[moments[-1]]:
        return None
    for before, moment in zip(moments[-2::-1], moments[:0:-1], strict=False):
        both = apart[before] & apart[moment]
        if moment[0] == before[0] + 1:
            return (moment, both) if both else None
    return (moments[-1], apart[moments[-1]]) if is_over else None


def is_beyond_rounding(drift: Drift) -> bool:
    """Tell whether the replicas differ by more than other ways of rounding can make of equal ones, such as a random one."""
    found = [
        (share, _EXACTNESS.get(drift.replica.kinds[place], 1.0))
        for place in drift.places
        if (share := _measure(drift.by_rank, drift.digests, place)) is not None
    ]
    return not found or statistics.median(share for share, _ in found) > max(
        1e-3, 64 * statistics.median(exactness for _, exactness in found)
    )


def have_averaged(drift: Drift) -> bool | None:
    """Tell whether buckets of gradients were sent between the last two digests; None if not all collectives between them are known."""
    first, last = drift.seqs
    if first == last:
        return False
    known: dict[int, Op] = {}
    for evidence in drift.evidence.values():
        for op in evidence.ops:
            group = evidence.groups.get(op.group)
            if group is not None and group.ranks == drift.replica.members and not op.is_message:
                known[op.seq] = op
    between = [known.get(seq) for seq in range(first + 1, last + 1)]
    if any(op is not None and is_gradient(op) for op in between):
        return True
    return None if None in between else False


def are_carried(drift: Drift) -> bool:
    """Tell whether the ranks exchange something else that is as large as a parameter: they may make the replicas equal by hand."""
    for rank, replica in drift.by_rank.items():
        evidence = drift.evidence[rank]
        if len(evidence.ops) >= _MANY_RECORDS:
            return True  # what came before is gone
        first_seq = replica.moments[0][1]
        for op in evidence.ops:
            group = evidence.groups.get(op.group)
            is_earlier = (
                group is not None
                and group.ranks == replica.members
                and not op.is_message
                and op.seq <= first_seq
            )
            if not is_earlier and _is_carrier(op, replica.largest):
                return True
    return False


def _is_carrier(op: Op, largest: int) -> bool:
    if is_gradient(op) or is_wrapping(op) or is_buffers(op) or op.name in {"barrier", "monitored_barrier"}:
        return False
    return op.num_elements is None or op.num_elements >= largest


def tell_drift(drift: Drift) -> str:
    """Return which parameters differ, between whom, and since when, in a clause."""
    names = list_names(drift.replica)
    chosen = [names[place] for place in drift.places]
    if len(chosen) == len(names) > 1:
        what = f"all {len(names)} parameters differ"
    else:
        shown = ", ".join(chosen[:_MOST_NAMED]) + (", …" if len(chosen) > _MOST_NAMED else "")
        what = f"{shown} ({len(chosen)} of {len(names)} parameters) {'differs' if len(chosen) == 1 else 'differ'}"
    return f"{what} between {_tell_camps(drift)} {_tell_since(drift)}{_tell_example(drift, names)}"


def _tell_camps(drift: Drift) -> str:
    camps = drift.camps
    if len(camps) == 2:
        most, fewest = camps
        return f"{name_ranks(fewest)} and {name_ranks(most)}" if len(most) > len(fewest) else " and ".join(map(name_ranks, camps))  # fmt: skip
    return name_ranks(tuple(sorted(drift.digests)))


def _tell_since(drift: Drift) -> str:
    if drift.step == 0:
        return "already before the first step"
    if drift.equal_step is None:
        return f"since step {drift.step} or earlier"
    if drift.equal_step == drift.step - 1:
        return f"since step {drift.step}"
    return f"since one of the steps {drift.equal_step + 1} to {drift.step}"


def _tell_example(drift: Drift, names: Sequence[str]) -> str:
    """Return one element as two of the ranks hold it, if that can be seen."""
    odd, even = drift.camps[-1][0], drift.camps[0][0]
    for place in drift.places:
        values = [read_sample(drift.by_rank[rank], drift.digests[rank], place) for rank in (even, odd)]
        told = [f"{value:.4g}" for value in values if value is not None]
        if len(set(told)) == 2:
            return f" (in {names[place]}: {told[0]} on rank {even}, {told[1]} on rank {odd})"
    return ""
