"""What healthy jobs do, seen at any moment: no rule may call it wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rankwise.evidence.reader.scene import Evidence, Group, Op, RankFacts
from rankwise.verdict import group_sequences, scene_view
from rankwise.verdict.run_rules import look
from scenes import (
    NOW_S,
    buffers,
    elsewhere,
    ended,
    gradient,
    in_backward,
    in_call,
    in_loader,
    op,
    rank,
    scene,
    workers,
)  # fmt: skip

_OPEN = {"is_over": False}
_JOIN = {"inside": ("__exit__", "main_hook", "_match_all_reduce_for_bwd_pass", "all_reduce")}
_SCENES: dict[str, list[RankFacts]] = {
    "branches with the same collective": [rank(0, op(at=5), op("barrier", at=9)), rank(1, op(at=7), op("barrier", at=9))],
    "rank 0 first": [
        rank(0, op("barrier", at=9), op(at=12)),
        rank(1, op("barrier", at=6), op(at=12)),
    ],
    "rank 0 first, twice": [
        rank(0, op("barrier", at=9), op("barrier", at=19), op(at=22)),
        rank(1, op("barrier", at=6), op("barrier", at=16), op(at=22)),
    ],
    "barriers crossed": [
        rank(0, op("barrier", at=9), op("barrier", at=6)), rank(1, op("barrier", at=6), op("barrier", at=9)),
    ],
    "uneven all_to_all": [rank(0, op("all_to_all_single", shape=(3,))), rank(1, op("all_to_all_single", shape=(5,)))],
    "scatter": [rank(0, op("scatter", shape=(8,), root=0)), rank(1, op("scatter", shape=(), root=0))],
    "gather to one, with lists that differ": [rank(0, op("gather", root=0)), rank(1, op("gather", root=0))],
    "a number met by one element": [rank(0, op(shape=())), rank(1, op(shape=(1,)))],
    "flat met by its own shape": [rank(0, op(shape=(6,))), rank(1, op(shape=(2, 3)))],
    "uneven all_gather with NCCL": [
        rank(0, op("all_gather", shape=(2,)), backend="nccl"), rank(1, op("all_gather", shape=(3,)), backend="nccl"),
    ],
    "NCCL's barrier by its inner name": [
        rank(0, op("barrier"), backend="nccl"), rank(1, op("all_reduce", shape=(1,), source="native"), backend="nccl"),
    ],
    "one collective by two names": [rank(0, op("all_gather")), rank(1, op("all_gather_into_tensor"))],
    "types by two spellings": [rank(0, op(dtypes=("Float",))), rank(1, op(dtypes=("torch.float32",)))],
    "operators by two spellings": [rank(0, op(reduce_op="ReduceOp.SUM")), rank(1, op(reduce_op="sum"))],
    "an operator that C++ does not tell": [rank(0, op(reduce_op="sum")), rank(1, op(source="native"))],
    "join": [
        rank(0, gradient(), op(shape=(20,), at=5, **_JOIN), op(shape=(1,), at=5, **_JOIN), at=elsewhere()),
        rank(1, gradient(), gradient(), op(shape=(1,), at=6, inside=("forward", "notify_join_context")), at=elsewhere()),
    ],
    "two models": [rank(number, gradient(8), gradient(11, shape=(30,)), gradient(8), gradient(11, shape=(30,))) for number in range(2)],
    "in flight": [rank(0, op(**_OPEN), op(**_OPEN), at=elsewhere()), rank(1, at=elsewhere(3))],
    "in flight, and in backward that computes": [
        rank(0, gradient(**_OPEN), gradient(**_OPEN), at=in_backward(), is_asleep=False), rank(1, at=elsewhere(3)),
    ],
    "ends seconds apart": [ended(0, op()), rank(1, op(), at=elsewhere()), rank(2, op(), at=in_loader(), children=workers("Z", "S"))],
    "ends with the last collective open": [ended(0, op("broadcast", root=0)), rank(1, op("broadcast", root=0, **_OPEN), at=in_call("broadcast"))],
    "a pipeline": [
        rank(0, op("send", peer=1, **_OPEN), at=in_call("send"), world=3),
        rank(1, op("recv", peer=0, **_OPEN), at=in_call("recv"), world=3),
        rank(2, op("recv", peer=1, **_OPEN), at=in_call("recv"), world=3),
    ],
    "an exchange of messages": [
        rank(0, op("isend", peer=1, **_OPEN), op("irecv", peer=1, **_OPEN), at=in_call("wait")),
        rank(1, op("isend", peer=0, **_OPEN), op("irecv", peer=0, **_OPEN), at=in_call("wait")),
    ],
    "receiving from any": [
        rank(0, op("recv", peer=-1, **_OPEN), at=in_call("recv")), rank(1, op("recv", peer=-1, **_OPEN), at=in_call("recv")),
    ],
    "all in one collective": [rank(number, op(**_OPEN), at=in_call(), world=3) for number in range(3)],
    "all in init": [rank(number, at=in_call("init_process_group"), has_joined=False) for number in range(2)],
    "a group made anew": [
        rank(0, op(seq=1), op("barrier", seq=2), op("barrier", seq=1)), rank(1, op(seq=1), op("barrier", seq=2)),
    ],
    "parts of one group that was split": [
        rank(number, groups=(Group(name="1", ranks=(number, number + 2), backend="nccl"),), world=4, backend="nccl") for number in range(2)
    ],
    "groups named by their members": [
        rank(number, groups=(Group(name=f"a{number}", ranks=(number, number + 2), backend="gloo"),), world=4) for number in range(2)
    ],
    "nothing recorded": [RankFacts(rank=0), RankFacts(rank=1, evidence=Evidence())],
    "ranks without torch": [RankFacts(rank=0, state="ended", code=0), RankFacts(rank=1, stack=elsewhere())],
    "an unknown collective": [rank(0, op("all_reduce_by_magic")), rank(1, op("barrier"))],
    "other nodes": [rank(0, op(**_OPEN), at=in_call(), world=4)],
}  # fmt: skip


@pytest.mark.parametrize("name", _SCENES)
def test_healthy_jobs_are_left_alone(name: str) -> None:
    """Not a word is said of them."""
    told = look(scene(*_SCENES[name], is_whole=name != "other nodes"))
    assert [finding.message for finding in told] == (
        # Rank 2 of the pipeline waits for rank 1, which waits for rank 0: all is on its way, and rank 0 sends.
        []
    )


@pytest.mark.parametrize(
    "away",
    [
        rank(1, op(), at=elsewhere(20), is_asleep=False),
        rank(1, op(), at=elsewhere(20)),
        rank(1, op(), at=in_loader(), children=workers("S", "R")),
        rank(1, op(), at=elsewhere(20), reads_terminal=True),
        rank(1, op(), at=None),
        rank(1, op(), at=None, state="disk sleep"),
    ],
    ids=["evaluates", "sleeps", "loads", "is debugged", "does not answer", "writes to a disk"],
)
def test_a_rank_that_may_still_come_is_never_a_proof(away: RankFacts) -> None:
    """A legal evaluation on one rank looks just like this, however long it lasts."""
    for still_s in (0.0, 5.0, 5000.0):
        waiting = rank(0, op(), op(**_OPEN), at=in_call(), still_s=still_s)
        assert not [finding for finding in look(scene(waiting, away)) if finding.is_proof]


#: A ring for tests: with fewer operations than this it has forgotten none.
_KEPT = 4
_NAMES = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "barrier",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "gather",
)


@st.composite
def _healthy(draw: st.DrawFn) -> list[RankFacts]:
    """Return ranks that all make the same list of collectives, each at a point of its own, with holes in what is known."""
    world = draw(st.integers(2, 5))
    members = [
        tuple(range(world)),
        *draw(
            st.lists(
                st.sets(st.integers(0, world - 1), min_size=2).map(lambda one: tuple(sorted(one))),
                max_size=2,
                unique=True,
            )
        ),
    ]
    groups = [Group(name=str(number), ranks=ranks, backend="gloo") for number, ranks in enumerate(members)]
    program = draw(
        st.lists(
            st.tuples(
                st.integers(0, len(groups) - 1),
                st.sampled_from(_NAMES),
                st.integers(1, 9),
                st.booleans(),
                st.booleans(),
            ),
            min_size=1,
            max_size=12,
        )
    )
    ends = draw(st.booleans())
    ranks = []
    for number in range(world):
        counts: dict[str, int] = {}
        reached = draw(st.integers(0, len(program)))
        ops: list[Op] = []
        for index, (which, name, size, is_native, is_waited) in enumerate(program[:reached]):
            group = groups[which]
            if number not in group.ranks:
                continue
            seq = counts[group.name] = counts.get(group.name, 0) + 1
            is_last = index == reached - 1
            is_over = draw(st.sampled_from([True, False] if is_last or not is_waited else [True]))
            facts: dict[str, Any] = {"source": "native", "inside": ("backward",)} if is_native else {}
            root = group.ranks[size % len(group.ranks)] if name in {"broadcast", "gather"} else None
            shape = (size + number,) if name == "all_to_all_single" else (size,)
            # Ranks may come to the same collective by different branches, never in another order.
            site = 10 * index + (number % 2 if draw(st.booleans()) else 0)
            ops.append(op(name, seq=seq, at=site, shape=shape, group=group.name, root=root, is_over=is_over, **facts))
        is_through = ends and reached == len(program)
        is_fresh = draw(st.booleans())
        if not is_fresh:
            while ops and ops[-1].source == "native":
                ops.pop()
        if len(ops) > _KEPT:
            ops = ops[draw(st.integers(0, len(ops) - _KEPT)) :]
        own = tuple(group for group in groups[1:] if number in group.ranks)
        told: dict[str, Any] = {"groups": own, "world": world, "dumped_s": NOW_S if is_fresh else NOW_S - 60}
        if is_through:
            ranks.append(ended(number, *ops, ended_s=NOW_S - 1, **{**told, "dumped_s": NOW_S if is_fresh else None}))
            continue
        waits = bool(ops) and ops[-1].is_over is False
        at = (
            draw(st.sampled_from([None, elsewhere()]))
            if not waits
            else in_backward()
            if ops[-1].source == "native"
            else in_call(ops[-1].name)
        )
        still_s = 0.5 if ends else draw(st.sampled_from([0.0, 1.5, 20.0]))
        ranks.append(rank(number, *ops, at=at, still_s=still_s, **told))
    return ranks


@settings(max_examples=400, deadline=None)
@given(ranks=_healthy(), is_whole=st.booleans())
def test_no_moment_of_a_healthy_job_proves_anything(ranks: list[RankFacts], is_whole: bool) -> None:
    """All ranks make the same collectives in the same order: whatever of it is seen, and whenever, it is no proof."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_sequences, "WHOLE_BELOW", _KEPT)
        patch.setattr(scene_view, "WHOLE_BELOW", _KEPT)
        told = look(scene(*ranks, is_whole=is_whole))
    assert not [finding.message for finding in told if finding.is_proof or finding.kind == "mismatch"]


@settings(max_examples=150, deadline=None)
@given(ranks=_healthy(), which=st.integers(0, 4), code=st.sampled_from([0, 1, -9]))
def test_a_scene_with_a_dead_rank_is_always_judged(ranks: list[RankFacts], which: int, code: int) -> None:
    """Whoever of them ends: each finding is whole, and names ranks of the job."""
    number = which % len(ranks)
    ranks[number] = replace(ranks[number], state="ended", code=code, ended_s=NOW_S - 9, stack=None)
    for finding in look(scene(*ranks)):
        assert all((finding.message, finding.fix, finding.key, finding.culprits))
        assert set(finding.culprits) <= set(range(len(ranks)))
        assert finding.rule


def test_buffers_of_all_ranks_are_no_evaluation() -> None:
    """DDP broadcasts buffers before each forward pass of each rank."""
    assert not look(scene(*(rank(number, buffers(), gradient(), buffers(), at=elsewhere()) for number in range(3))))


def test_a_group_that_was_used_long_ago_is_not_called_unused() -> None:
    """Rank 1 met the pair's collective first of all, and its ring has forgotten it since; then it ended."""
    pair = (Group(name="1", ranks=(0, 1), backend="gloo"),)
    late = rank(0, op(group="1", **_OPEN), at=in_call(), groups=pair, world=3)
    gone = ended(1, *(op() for _ in range(300)), groups=pair, world=3)
    assert not look(scene(late, gone, rank(2, world=3, at=elsewhere())))
