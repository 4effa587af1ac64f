"""Ranks that do not agree how much goes from one to another: the rank is named whose lists are odd, and legal exchanges are left alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader.scene import Op, RankFacts
from rankwise.verdict.case import Case, RankEnd
from rankwise.verdict.first_failure import judge
from rankwise.verdict.run_rules import look
from rankwise.verdict.split_mismatch import find_odd, find_split_mismatches
from scenes import in_call, op, rank, scene

Lists = tuple[tuple[int, ...], tuple[int, ...]]
EVEN = (2, 2, 2)


def _exchange(gives: tuple[int, ...], gets: tuple[int, ...], name: str = "all_to_all_single", **facts: Any) -> Op:  # fmt: skip
    return op(name, shape=(sum(gives),), gives=gives, gets=gets, **{"is_over": False, **facts})


def _ranks(*lists: Lists, **facts: Any) -> list[RankFacts]:
    return [
        rank(number, op(), _exchange(*both, **facts), at=in_call("all_to_all_single"), world=len(lists))
        for number, both in enumerate(lists)
    ]


@pytest.mark.parametrize(
    ("lists", "culprits"),
    [
        ([(EVEN, EVEN), ((3, 2, 1), EVEN), (EVEN, EVEN)], (1,)),
        ([(EVEN, EVEN), (EVEN, (2, 2, 1)), (EVEN, EVEN)], (1,)),
        # Only one pair does not fit, and two of three agree.
        ([(EVEN, EVEN), ((3, 2, 2), EVEN), (EVEN, EVEN)], (1,)),
        # A rank that does not agree with itself.
        ([((2, 2), (2, 2)), ((2, 3), (2, 2))], (1,)),
        # A pair that does not fit, and nobody else to ask.
        ([((2, 2), (2, 2)), ((3, 2), (2, 2))], (0, 1)),
        ([((1, 2, 3), (1, 4, 7)), ((4, 5, 6), (2, 5, 8)), ((7, 9, 9), (3, 6, 9))], (1, 2)),
    ],
)
def test_whose_lists_are_odd_is_named(lists: list[Lists], culprits: tuple[int, ...]) -> None:
    """Not who gets too much, but whose lists explain all that does not fit; both where nothing tells."""
    (finding,) = look(scene(*_ranks(*lists)))
    assert (finding.rule, finding.class_id, finding.kind) == ("other_splits", "C5", "mismatch")
    assert finding.culprits == culprits
    assert finding.is_proof


def test_it_is_told_in_rows_who_gives_whom_how_much() -> None:
    """A tensor of several columns is cut by rows, and the script counts those."""
    wide = {"shapes": ((6, 512),)}
    even, odd = tuple(1024 for _ in range(3)), (1536, 1024, 512)
    ranks = [
        rank(number, Op(group="0", seq=0, name="all_to_all_single", gives=odd if number == 1 else even, gets=even, is_over=False,
                        site="/job/train.py:7", **wide), at=in_call("all_to_all_single"), world=3)
        for number in range(3)
    ]  # fmt: skip
    (finding,) = look(scene(*ranks))
    assert "rank 1 sends rank 0 3 rows, but 2 are expected" in finding.message
    assert "rank 1 sends rank 2 1 row, but 2 are expected" in finding.message
    assert finding.where == "/job/train.py:7"


def test_what_is_not_known_of_a_rank_proves_nothing() -> None:
    """Lists that had no room in a record, or of another length, are compared with none."""
    assert look(scene(*_ranks(((2, 1), (2, 2)), ((), ()), is_over=True))) == ()
    assert look(scene(*_ranks(((2, 1), (2, 2)), ((1,), (9,)), is_over=True))) == ()


_COUNTS = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size)
)


@given(_COUNTS)
def test_exchanges_that_fit_are_no_misfits(counts: list[list[int]]) -> None:
    """However uneven: what each gives is what the other expects."""
    ops = {rank: _exchange(tuple(row), tuple(other[rank] for other in counts)) for rank, row in enumerate(counts)}
    assert find_split_mismatches(tuple(ops), ops) == ()


@given(_COUNTS, st.data())
def test_one_rank_that_is_wrong_is_among_those_named(counts: list[list[int]], data: st.DataObject) -> None:
    """Whatever it gives too much or too little; and who has no part in a misfit is never named."""
    odd = data.draw(st.integers(0, len(counts) - 1))
    whom = data.draw(st.integers(0, len(counts) - 1))
    ops = {
        rank: _exchange(
            tuple(number + (rank == odd and getter == whom) for getter, number in enumerate(row)),
            tuple(other[rank] for other in counts),
        )
        for rank, row in enumerate(counts)
    }
    mismatches = find_split_mismatches(tuple(ops), ops)
    found = find_odd(mismatches, ops)
    assert {(one.giver, one.getter) for one in mismatches} == {(odd, whom)}
    assert found
    assert set(found) <= {odd, whom}


def test_a_rank_that_gloo_stops_over_its_own_share_is_told_by_the_lists() -> None:
    """Gloo's text speaks of lengths alone; the lists tell how much of what, and that nobody else is wrong."""
    ranks = _ranks((EVEN, EVEN), ((1, 3, 2), EVEN), (EVEN, EVEN))
    text = "RuntimeError: [enforce fail at alltoallv.cc:138] inLengthPerRank[myRank] == outLengthPerRank[myRank]. "
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:5"
    ends = tuple(
        RankEnd(rank=number, local_rank=number, code=1, ended_s=1.0, fault=FaultRecord(message=text if number == 1 else lost))
        for number in range(3)
    )  # fmt: skip
    verdict = judge(Case(ranks=ends, world_size=3, scene=scene(*ranks)))
    assert (verdict.kind, verdict.rule, verdict.class_id, verdict.culprits) == (
        "mismatch", "other_splits", "C5", (1,),
    )  # fmt: skip
    assert "rank 1 sends itself 3 elements, but 2 are expected" in verdict.message
    alone = judge(Case(ranks=ends[1:2], world_size=1))
    assert (alone.kind, alone.class_id) == ("mismatch", "C5")
