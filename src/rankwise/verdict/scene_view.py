"""A scene, read: which collectives belong together, who waits for whom, and what every rule asks about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, final

from rankwise.evidence.reader.scene import FRESH_S
from rankwise.verdict.desync import walk_back
from rankwise.verdict.finding import Waiting
from rankwise.verdict.group_sequences import WHOLE_BELOW, GroupSequence, find_sequences
from rankwise.verdict.library_deadlock import find_crossing
from rankwise.verdict.local_wait import LocalWait, find_local_wait
from rankwise.verdict.mismatch import Mismatch, find_mismatches
from rankwise.verdict.own_processes import with_own
from rankwise.verdict.rank_state import RankState, find_state
from rankwise.verdict.user_source import UserSource
from rankwise.verdict.wording import name_briefly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.evidence.reader.scene import Op, RankFacts, Scene

#: When a member has ended, what it had sent before is through by then.
_SURE_S = 3.0
_SETTLED_S = 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Ranks that wait in one collective, and those that have not reached it and wait for nobody themselves.

    Attributes:
        op: What the first of the waiting ranks has entered; None if nothing recorded tells.
        sequence: Its group; None for messages, and where nothing recorded tells.
        waiting: Who waits.
        missing: Who has not come.
        is_known: Whether the records show that the missing have not entered it; else only their stacks do.
    """

    op: Op | None
    sequence: GroupSequence | None
    waiting: tuple[RankState, ...]
    missing: tuple[int, ...]
    is_known: bool

    def was_here(self, rank: int) -> bool:
        """Tell whether a rank is known to have made this collective from this line before."""
        op, sequence = self.op, self.sequence
        return op is not None and sequence is not None and sequence.has_been_at(rank, op.site)

    @property
    def have_been_here(self) -> bool:
        """Whether all that are missing are known to have."""
        return all(map(self.was_here, self.missing))


@final
class SceneView:
    """All that the rules ask of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._behind: dict[tuple[int, int], frozenset[int]] = {}

    @cached_property
    def by_rank(self) -> dict[int, RankFacts]:
        """The ranks that can be seen."""
        return {facts.rank: facts for facts in self.scene.ranks}

    @cached_property
    def source(self) -> UserSource:
        """What the user's source says of where they stand."""
        return UserSource(self.by_rank, self.scene.sources)

    @cached_property
    def rank_states(self) -> dict[int, RankState]:
        """Where each of them stands."""
        return {facts.rank: find_state(facts) for facts in self.scene.ranks}

    @cached_property
    def local_waits(self) -> dict[int, LocalWait]:
        """What idle ranks wait for that is no rank, where that is known."""
        idle = [rank for rank, one in self.rank_states.items() if one.doing in {"asleep", "unknown"}]
        found = {rank: find_local_wait(self.by_rank[rank], self.scene.sources) for rank in idle}
        return {
            rank: with_own(local_wait, self.by_rank[rank], self.scene)
            for rank, local_wait in found.items()
            if local_wait is not None and self.is_settled(rank)
        }

    @cached_property
    def sequences(self) -> tuple[GroupSequence, ...]:
        """All groups."""
        return find_sequences(self.scene)

    @cached_property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """Where ranks diverged under the same number: the first of each group and kind."""
        found = find_mismatches(self.sequences)
        parted = {id(mismatch.sequence) for mismatch in found}
        breaches = [(one, self.find_breach(one)) for one in self.sequences if id(one) not in parted]
        begun = walk_back(found, breaches, self.source)
        return begun if begun or self.crossing is None else (self.crossing,)

    @cached_property
    def crossing(self) -> Mismatch | None:
        """Where ranks wait for each other in a call of rankwise's library and in another collective."""
        rank_states = [self.rank_states[rank] for rank in self.deadlocked]
        # Only fresh records tell that a rank has not reached what C++ issued.
        if not all(self.is_settled(one.rank) and self.is_fresh(one.rank) for one in rank_states):
            return None
        return find_crossing(
            [(one, one.op, self.sequence_of(one.rank, one.op) if one.op else None) for one in rank_states]
        )

    def find_breach(self, sequence: GroupSequence) -> tuple[Op, tuple[int, ...], tuple[int, ...]] | None:
        """Return a collective that can't end, as members have ended well without it: the collective, who came, who is gone."""
        seen: set[int] = set()
        for rank in sequence.ops:
            op = sequence.last_op(rank)
            if op is None or op.seq in seen or not (op.has_raised or op in self.rank_states[rank].ops[:1]):
                continue
            seen.add(op.seq)
            came, gone = sequence.split_at(op.seq)
            is_sure = op.source == "python" or all(map(self.is_fresh, gone))
            if gone and is_sure and all(self._left_well(sequence, one, op.seq) for one in gone):
                return op, came, gone
        return None

    def _left_well(self, sequence: GroupSequence, rank: int, seq: int) -> bool:
        facts = self.by_rank.get(rank)
        return facts is not None and facts.code == 0 and self._records(rank) and sequence.is_behind(rank, seq)

    @cached_property
    def _sequence_of(self) -> dict[tuple[int, str], GroupSequence]:
        found = {}
        for sequence in self.sequences:
            for rank in sequence.ops:
                for op in sequence.ops[rank].values():
                    found[rank, op.group] = sequence
                    break
        return found

    def sequence_of(self, rank: int, op: Op) -> GroupSequence | None:
        """Return the group that a rank's operation belongs to."""
        return None if op.is_message else self._sequence_of.get((rank, op.group))

    def members_of(self, rank: int, op: Op) -> tuple[tuple[int, ...], str]:
        """Return the members and the backend of an operation's group, also of a message's; nothing if that is not known."""
        evidence = self.by_rank[rank].evidence
        group = evidence.groups.get(op.group) if evidence is not None else None
        return ((), "") if group is None else (group.ranks, group.backend)

    def is_fresh(self, rank: int) -> bool:
        """Tell whether a rank's records hold all that it has issued, also from C++."""
        facts = self.by_rank.get(rank)
        if facts is None or facts.evidence is None or facts.evidence.dumped_s is None:
            return False
        moved_s = facts.ended_s if facts.ended_s is not None else self.scene.now_s - facts.still_s
        late_s = 0 if facts.ended_s is None else FRESH_S
        return facts.evidence.dumped_s + late_s >= min(moved_s, self.scene.now_s - FRESH_S)

    @cached_property
    def awaited(self) -> dict[int, frozenset[int]]:
        """For each rank that waits, the ranks that are known not to have reached what it waits for."""
        return {
            rank: self._find_awaited(rank_state)
            for rank, rank_state in self.rank_states.items()
            if rank_state.wait in {"call", "handle", "backward", "device", "library"}
        }

    def _find_awaited(self, rank_state: RankState) -> frozenset[int]:
        # Of a handle it is not known which work it is: only who misses all of them is surely awaited.
        ops = rank_state.ops if rank_state.wait in {"handle", "backward", "device"} else rank_state.ops[:1]
        found = [self._absent_from(rank_state.rank, op) for op in ops]
        return frozenset.intersection(*found) if found else frozenset()

    def _absent_from(self, rank: int, op: Op) -> frozenset[int]:
        if op.is_message:
            return self._absent_peer(rank, op)
        if not op.group:
            return self._absent_first()
        sequence = self.sequence_of(rank, op)
        if sequence is None:
            return frozenset()
        key = (id(sequence), op.seq)
        if key not in self._behind:
            self._behind[key] = frozenset(
                other for other in sequence.ranks if self._records(other) and sequence.is_behind(other, op.seq)
            )
        return self._behind[key]

    def _absent_first(self) -> frozenset[int]:
        """Return whose block the others wait to see ended: the one rank that is not among them."""
        inside = {one.rank for one in self.rank_states.values() if one.op is not None and not one.op.group}
        others = self.by_rank.keys() - inside
        is_sure = len(others) == 1 and self.scene.is_whole and all(map(self._records, others))
        return frozenset(others) if is_sure else frozenset()

    def _records(self, rank: int) -> bool:
        facts = self.by_rank.get(rank)
        return facts is not None and facts.evidence is not None

    def _absent_peer(self, rank: int, op: Op) -> frozenset[int]:
        peer = self.by_rank.get(op.peer) if op.peer is not None else None
        if peer is None or peer.evidence is None:
            return frozenset()
        mine = [one for one in peer.ops if one.is_message and one.is_send != op.is_send and one.peer in {rank, -1}]
        if not mine and len(peer.ops) >= WHOLE_BELOW:
            return frozenset()  # its answer may have been long ago
        has_answered = any(one.seq >= op.seq or one.peer == -1 for one in mine)
        return frozenset() if has_answered else frozenset({peer.rank})

    @cached_property
    def deadlocked(self) -> tuple[int, ...]:
        """The ranks that wait for each other in a circle; ascending."""
        waits = {rank: set(awaited) for rank, awaited in self.awaited.items() if awaited}
        while True:
            awaited = set().union(*waits.values()) if waits else set()
            # Who waits for none of these, or is awaited by none of them, is on no circle.
            kept = {rank: set(for_whom) & waits.keys() for rank, for_whom in waits.items() if rank in awaited}
            kept = {rank: for_whom for rank, for_whom in kept.items() if for_whom & kept.keys()}
            if kept == waits:
                return tuple(sorted(kept))
            waits = kept

    @cached_property
    def absences(self) -> tuple[Absence, ...]:
        """Who waits for whom, where those who have not come do something else; one for the same missing ranks."""
        merged: list[Absence] = []
        for absence in sorted(self._known_absences(), key=lambda one: -len(one.waiting)):
            near = next((one for one in merged if self._belong_together(one, absence)), None)
            if near is None:
                merged.append(absence)
                continue
            merged[merged.index(near)] = replace(
                near,
                waiting=(*near.waiting, *absence.waiting),
                missing=tuple(sorted({*near.missing, *absence.missing})),
            )
        known = {rank for one in merged for rank in one.missing}
        return (*merged, *(one for one in self._guessed_absences() if not known & set(one.missing)))

    def _belong_together(self, one: Absence, other: Absence) -> bool:
        """Tell whether the same ranks are missed, or the same stage of several pipelines beside each other."""
        stages = {self.stages.get(rank) for rank in (*one.missing, *other.missing)}
        return bool({*one.missing} & {*other.missing}) or (len(stages) == 1 and None not in stages)

    @cached_property
    def stages(self) -> dict[int, frozenset[int]]:
        """Which stages of a pipeline each rank holds, by what it has sent and received, and by what others expect of it."""
        found: dict[int, set[int]] = {}
        for facts in self.scene.ranks:
            for op in facts.ops:
                if (flow := op.flow) is not None:
                    found.setdefault(facts.rank, set()).add(flow.stage)
                    if op.peer is not None:
                        found.setdefault(op.peer, set()).add(flow.other)
        return {rank: frozenset(stages) for rank, stages in found.items()}

    def _known_absences(self) -> list[Absence]:
        found: dict[tuple[int, int, str], tuple[Op, GroupSequence | None, list[RankState], set[int]]] = {}
        for rank, awaited in self.awaited.items():
            rank_state = self.rank_states[rank]
            op = rank_state.op
            missing = {other for other in awaited if self._is_elsewhere(other)}
            if op is None or not missing:
                continue
            sequence = self.sequence_of(rank, op)
            key = (id(sequence), op.seq, "") if sequence else (-1 - rank, op.seq, op.name)
            entry = found.setdefault(key, (op, sequence, [], set()))
            entry[2].append(rank_state)
            entry[3].update(missing)
        return [
            Absence(
                op=op,
                sequence=sequence,
                waiting=tuple(waiting),
                missing=tuple(sorted(missing)),
                is_known=True,
            )
            for op, sequence, waiting, missing in found.values()
        ]

    def _guessed_absences(self) -> list[Absence]:
        """Ranks whose stack shows a wait that no record explains: for those that are in none themselves."""
        unexplained = [
            rank_state
            for rank_state in self.rank_states.values()
            if rank_state.wait in {"call", "handle", "backward", "library"}
            and not rank_state.ops
            and self.has_joined(rank_state.rank)
        ]
        elsewhere = [rank for rank in self.rank_states if self._is_elsewhere(rank) and self.has_joined(rank)]
        if not unexplained or not elsewhere or not self.scene.is_whole:
            return []
        return [Absence(op=None, sequence=None, waiting=tuple(unexplained), missing=tuple(elsewhere), is_known=False)]

    def has_joined(self, rank: int) -> bool:
        """Tell whether a rank has made its first group."""
        evidence = self.by_rank[rank].evidence
        return evidence is not None and evidence.has_joined

    def _is_elsewhere(self, rank: int) -> bool:
        """Tell whether a rank that can be seen waits for no other one."""
        facts = self.by_rank.get(rank)
        if facts is None:
            return False
        if facts.state in {"ended", "stopped"}:
            return True
        # One that does not answer when others do is somewhere too: in C code that holds the interpreter.
        return facts.evidence is not None and self.rank_states[rank].wait is None

    def is_placed(self, rank: int) -> bool:
        """Tell whether it is known where a rank stands, or that it has ended."""
        facts = self.by_rank[rank]
        return facts.evidence is not None and (facts.state == "ended" or facts.stack is not None)

    def is_settled(self, rank: int) -> bool:
        """Tell whether a rank has not moved lately: two ranks are not looked at in one moment."""
        return self.by_rank[rank].still_s >= _SETTLED_S

    def may_come(self, rank: int) -> bool:
        """Tell whether a rank that is missed may be on its way: slow is not stuck, and no fault is named for it."""
        return self.rank_states[rank].doing not in {"asleep", "ended", "stopped", "in a collective"}

    def may_any_come(self, absence: Absence) -> bool:
        """Tell whether one of those that are missed may."""
        return any(map(self.may_come, absence.missing))

    def have_ended(self, absence: Absence) -> bool:
        """Tell whether all that are missing have ended for sure without coming."""
        return set(self.find_ended(absence)) == set(absence.missing)

    def find_ended(self, absence: Absence) -> tuple[int, ...]:
        """Return those of the missing that have ended, and for sure did not come before."""
        gone = tuple(rank for rank in absence.missing if self.by_rank[rank].state == "ended")
        op = absence.op
        if op is not None and (op.source == "python" or all(self.is_fresh(rank) for rank in gone)):
            return gone
        # What it issued from C++ at the last is not known. But nobody else is missing, and nothing has come for long.
        times = [self.by_rank[rank].ended_s for rank in gone]
        ends = [self.scene.now_s - moment for moment in times if moment is not None]
        quiet = min((self.by_rank[one.rank].still_s for one in absence.waiting), default=0.0)
        is_sure = len(gone) == len(absence.missing) and len(ends) == len(gone) and min([quiet, *ends]) >= _SURE_S
        return gone if is_sure and self.scene.is_whole else ()

    def list_waiting(self, rank_states: Sequence[RankState]) -> tuple[Waiting, ...]:
        """Return who waits, as a verdict tells it."""
        return tuple(
            Waiting(rank=one.rank, where=one.site, op=name_briefly(one.op) if one.op else one.call)
            for one in sorted(rank_states, key=lambda one: one.rank)
            if one.site is not None
        )

    def since(self, rank_states: Sequence[RankState]) -> float | None:
        """Return when the first of them began to wait."""
        entered = [one.op.entered_s for one in rank_states if one.op and one.op.entered_s is not None]
        still = [self.scene.now_s - self.by_rank[one.rank].still_s for one in rank_states]
        return min(entered) if entered else min(still, default=None)
