"""Models that should be the same on all ranks and are not: which parameters differ, between whom, since which step. Pure functions."""

from __future__ import annotations

import bisect
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rankwise.base.rank_names import name_ranks
from rankwise.evidence.reader.replicas import list_names, list_sums, read_sample
from rankwise.verdict.wording import is_buffers, is_gradient, is_wrapping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.evidence.reader.replicas import Digest, Replica
    from rankwise.evidence.reader.scene import Evidence, Op, Scene

_Moment = tuple[int, int]
#: Between different machines numbers are rounded otherwise, so only so large a difference, of the larger number, is
#: one.
_ROUNDED = 1e-2
#: How exact the numbers of a type are.
_EXACTNESS = {"f": 1.2e-7, "d": 2.3e-16, "e": 9.8e-4, "b": 7.9e-3}
_MOST_NAMED = 3
#: Steps between two digests. Weights may be changed on each rank for fewer, and restored: to adapt them to data, or to
#: try a learning rate.
_FAR = 16
#: Records of one rank of which the oldest may be gone.
_MANY_RECORDS = 1000


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDrift:
    """Replicas of a model that differ.

    Attributes:
        by_rank: The model on each rank that can be seen.
        evidence: What each of these ranks has recorded.
        digests: Of the last moment that all of them have told of.
        places: The parameters that differ, by their number.
        equal_step: After which step they were equal for the last time; None if they never were.
        step: After which step they first differed; 0 before the first one.
        is_over: Whether all of these ranks have ended.
        is_proof: Whether they have, and differed at their end still.
        seqs: How many collectives the model's group had made at the digest before the last one, and at the last one.
    """

    by_rank: Mapping[int, Replica]
    evidence: Mapping[int, Evidence]
    digests: Mapping[int, Digest]
    places: tuple[int, ...]
    equal_step: int | None
    step: int
    is_over: bool
    is_proof: bool
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


def find_drifts(scene: Scene, kind: str) -> tuple[ReplicaDrift, ...]:
    """Return the models whose replicas differ for long enough, or at the end of a job that is over.

    Only digests of the same step are compared, and only if the ranks had made as many collectives by then: ranks that
        have
    legally made other numbers of steps are not compared at all. What one optimizer has made of a model is no drift if
    another one finds the replicas equal, before or later: then it was undone.
    """
    groups: dict[tuple[object, ...], dict[int, Replica]] = {}
    for facts in scene.ranks:
        for replica in facts.evidence.replicas if facts.evidence is not None else ():
            if replica.kind == kind and facts.rank in replica.members:
                key = (replica.members, replica.model, replica.optimizer, replica.form)
                groups.setdefault(key, {})[facts.rank] = replica
    over = {facts.rank for facts in scene.ranks if facts.state == "ended"}
    evidence = {facts.rank: facts.evidence for facts in scene.ranks if facts.evidence is not None}
    found = []
    for place, by_rank in groups.items():
        drift = _compare(by_rank, evidence, is_over=by_rank.keys() <= over)
        # The optimizers of models that are in no wrapper may have nothing to do with each other.
        others = [other for one, other in groups.items() if one[:2] == place[:2] and one != place and kind == "ddp"]
        if drift is not None and (drift.is_proof or not any(_is_undone(drift, other) for other in others)):
            found.append(drift)
    return tuple(found)


def _compare(by_rank: Mapping[int, Replica], evidence: Mapping[int, Evidence], *, is_over: bool) -> ReplicaDrift | None:
    if len(by_rank) < 2 or any(replica.is_hooked for replica in by_rank.values()):
        return None
    lines = [{(step, seq): total for step, seq, total in replica.moments} for replica in by_rank.values()]
    totals = {moment: {one[moment] for one in lines} for moment in _find_common(lines)}
    if not any(len(found) > 1 for found in totals.values()):
        return None
    digests = _find_digests(by_rank)
    apart = {moment: _find_apart(by_rank, held) for moment, held in digests.items()}
    chosen = _choose(apart, is_over=is_over)
    if chosen is None:
        return None
    moment, places = chosen
    has_last = is_over and all(replica.last is not None for replica in by_rank.values())
    if has_last:
        places = places & _find_apart_at_end(by_rank)
        if not places:
            return None
    step, equal_step = moment[0], None
    for (earlier, _), found in sorted(totals.items(), reverse=True):
        if earlier > moment[0]:
            continue
        if len(found) == 1:
            equal_step = earlier
            break
        step = earlier
    return ReplicaDrift(
        by_rank=by_rank,
        evidence={rank: evidence[rank] for rank in by_rank},
        digests=digests[moment],
        places=tuple(sorted(places)),
        equal_step=equal_step,
        step=step,
        is_over=is_over,
        is_proof=has_last,
        seqs=(max((one for one in digests if one < moment), default=(0, 0))[1], moment[1]),
    )


def _find_digests(by_rank: Mapping[int, Replica]) -> dict[_Moment, dict[int, Digest]]:
    """Return the digests of the moments that all ranks have told of, without those of the end."""
    of_rank = {
        rank: {(one.step, one.seq): one for one in replica.digests if not one.is_last}
        for rank, replica in by_rank.items()
    }
    return {
        moment: {rank: known[moment] for rank, known in of_rank.items()} for moment in _find_common([*of_rank.values()])
    }


def _find_apart_at_end(by_rank: Mapping[int, Replica]) -> set[int]:
    """Return the parameters that differ at the end; none where the ranks have not ended at the same place of their program."""
    last = {rank: replica.last for rank, replica in by_rank.items()}
    known = {rank: digest for rank, digest in last.items() if digest is not None}
    return _find_apart(by_rank, known) if len({one.seq for one in known.values()}) == 1 else set()


def _is_undone(drift: ReplicaDrift, others: Mapping[int, Replica]) -> bool:
    """Tell whether another optimizer, which changes the same parameters, finds them equal after a step, or later than they differed."""
    if others.keys() != drift.by_rank.keys():
        return False
    digests = _find_digests(others)
    if not digests:
        return False
    (rank, replica), moment = next(iter(others.items())), max(digests, key=lambda one: (one[0], one[1]))
    names, own = list_names(replica), list_names(drift.replica)
    wanted = {own[place] for place in drift.places}
    is_later = digests[moment][rank].order > drift.digests[rank].order
    if not wanted <= set(names) or not (is_later or moment[0] > 0):
        return False
    return not any(names[place] in wanted for place in _find_apart(others, digests[moment]))


def _find_common(lists: Sequence[Mapping[_Moment, object]]) -> list[_Moment]:
    return sorted(set(lists[0]).intersection(*lists[1:]))


def _find_apart(by_rank: Mapping[int, Replica], digests_by_rank: Mapping[int, Digest]) -> set[int]:
    """Return the parameters that differ at one moment."""
    columns = enumerate(zip(*(list_sums(digest) for digest in digests_by_rank.values()), strict=True))
    apart = {place for place, sums in columns if len(set(sums)) > 1}
    if len({replica.machine for replica in by_rank.values()}) > 1:
        apart = {place for place in apart if (_measure(by_rank, digests_by_rank, place) or 0.0) > _ROUNDED}
    return apart


def _measure(by_rank: Mapping[int, Replica], digests_by_rank: Mapping[int, Digest], place: int) -> float | None:
    """Return by how much of the larger one the sampled elements of a parameter differ; None if they can't be read."""
    values = [read_sample(by_rank[rank], digest, place) for rank, digest in digests_by_rank.items()]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if any(map(math.isnan, known)):
        return 0.0 if all(map(math.isnan, known)) else math.inf
    largest = max(map(abs, known))
    return (max(known) - min(known)) / largest if largest else 0.0


def _choose(apart: Mapping[_Moment, set[int]], *, is_over: bool) -> tuple[_Moment, set[int]] | None:
    """Return the last moment, and which parameters differ at it; None if that may be for a while only.

    As long as the job runs they must have differed at two digests in a row that lie far apart, and ever since.
    """
    moments = sorted(apart)
    if not moments or not apart[moments[-1]]:
        return None
    last, both = moments[-1], apart[moments[-1]]
    if is_over:
        is_second = len(moments) > 1 and last[0] == moments[-2][0] + 1
        both = both & apart[moments[-2]] if is_second else both
        return (last, both) if both else None
    for before, moment in zip(moments[-2::-1], moments[:0:-1], strict=True):
        both = both & apart[before]
        if not both:
            return None
        if moment[0] - before[0] >= _FAR:
            return last, both
    return None


def is_beyond_rounding(drift: ReplicaDrift) -> bool:
    """Tell whether the replicas differ by more than other ways of rounding can make of equal ones, such as a random one."""
    found = [
        (share, _EXACTNESS.get(drift.replica.kinds[place], 1.0))
        for place in drift.places
        if (share := _measure(drift.by_rank, drift.digests, place)) is not None
    ]
    return not found or statistics.median(share for share, _ in found) > max(
        1e-3, 64 * statistics.median(exactness for _, exactness in found)
    )


def have_averaged(drift: ReplicaDrift) -> bool | None:
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


def are_carried(drift: ReplicaDrift) -> bool:
    """Tell whether the ranks exchange something else that is as large as a parameter, or as half of all in pieces between two digests.

    Then they may make the replicas equal by hand.
    """
    return any(_carries(replica, drift.evidence[rank]) for rank, replica in drift.by_rank.items())


def _carries(replica: Replica, evidence: Evidence) -> bool:
    if len(evidence.ops) >= _MANY_RECORDS:
        return True  # what came before is gone
    seqs = sorted({seq for _, seq, _ in replica.moments})
    between, total = 0, 0
    for op in evidence.ops:
        group = evidence.groups.get(op.group)
        if group is not None and group.ranks == replica.members and not op.is_message:
            if op.seq <= seqs[0]:
                continue
            now = bisect.bisect_left(seqs, op.seq)
            between, total = now, total if now == between else 0
        if _is_of_torch(op):
            continue
        if op.num_elements is None or op.num_elements >= replica.largest:
            return True
        gathered = len(group.ranks) if group is not None and op.name.startswith("all_gather") else 1
        total += gathered * _count_floats(op)
        if 2 * total >= replica.elements > 0:
            return True
    return False


def _is_of_torch(op: Op) -> bool:
    return is_gradient(op) or is_wrapping(op) or is_buffers(op) or op.name in {"barrier", "monitored_barrier"}


def _count_floats(op: Op) -> int:
    dtypes = op.dtypes if len(op.dtypes) == len(op.shapes) else op.dtypes[:1] * len(op.shapes)
    return sum(math.prod(shape) for shape, dtype in zip(op.shapes, dtypes, strict=False) if "float" in dtype)


def explain_drift(drift: ReplicaDrift) -> str:
    """Return which parameters differ, between whom, and since when, in a clause."""
    names = list_names(drift.replica)
    chosen = [names[place] for place in drift.places]
    if len(chosen) == len(names) > 1:
        what = f"all {len(names)} parameters differ"
    else:
        shown = ", ".join(chosen[:_MOST_NAMED]) + (", …" if len(chosen) > _MOST_NAMED else "")
        what = f"{shown} ({len(chosen)} of {len(names)} parameters) {'differs' if len(chosen) == 1 else 'differ'}"
    return f"{what} between {_describe_camps(drift)} {_describe_since(drift)}{_describe_example(drift, names)}"


def _describe_camps(drift: ReplicaDrift) -> str:
    camps = drift.camps
    if len(camps) == 2:
        most, fewest = camps
        return (
            f"{name_ranks(fewest)} and {name_ranks(most)}"
            if len(most) > len(fewest)
            else " and ".join(map(name_ranks, camps))
        )
    return name_ranks(tuple(sorted(drift.digests)))


def _describe_since(drift: ReplicaDrift) -> str:
    if drift.step == 0:
        return "already before the first step"
    if drift.equal_step is None:
        return f"since step {drift.step} or earlier"
    if drift.equal_step == drift.step - 1:
        return f"since step {drift.step}"
    return f"since one of the steps {drift.equal_step + 1} to {drift.step}"


def _describe_example(drift: ReplicaDrift, names: Sequence[str]) -> str:
    """Return one element as two of the ranks hold it, if that can be seen."""
    odd, even = drift.camps[-1][0], drift.camps[0][0]
    for place in drift.places:
        values = [read_sample(drift.by_rank[rank], drift.digests[rank], place) for rank in (even, odd)]
        lines = [f"{value:.4g}" for value in values if value is not None]
        if len(set(lines)) == 2:
            return f" (in {names[place]}: {lines[0]} on rank {even}, {lines[1]} on rank {odd})"
    return ""
