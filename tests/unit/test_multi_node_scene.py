"""What a node tells another of its ranks: nothing is lost on the way but what is too much, and all moments are the reader's."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from rankwise.base.faults import FaultRecord
from rankwise.evidence.reader import multi_node_scene, scene_file
from rankwise.evidence.reader.multi_node_scene import (
    NodeScene,
    count_ops,
    join,
    open_message,
    pack,
    read_message,
)
from rankwise.evidence.reader.rank_activity import RankActivity
from rankwise.evidence.reader.scene import Child, Evidence, Group, Op, RankFacts
from rankwise.evidence.reader.size_limits import MOST_RANKS, expand_runs
from scenes import in_call, op, rank, scene

FAULT = FaultRecord(message="ValueError: boom", timestamp_s=1.7e9, monotonic_s=40.0)
EVIDENCE = Evidence(
    ops=(Op(group="default", seq=1, name="all_reduce", shapes=((3,),), entered_s=41.0, is_over=True), Op(group="default", seq=2, name="barrier")),
    groups={"default": Group(name="default", ranks=(0, 1, 2, 5), backend="gloo", own=5)},
    has_joined=True, step_s=42.0, dumped_s=43.0, stacks={"MainThread": in_call()}, stacks_s=44.0, handled={"MainThread": FAULT},
)  # fmt: skip
FACTS = RankFacts(
    rank=5, pid=7, state="ended", code=1, ended_s=45.0, fault=FAULT, finished_s=46.0, evidence=EVIDENCE, stack=in_call(),
    still_s=1.5, children=(Child(pid=9, name="worker", state="S"),),
)  # fmt: skip
ACTIVITY = RankActivity(rank=5, quiet_s=3.0, idle_s=2.5, is_answered=True, has_joined=True)


def make_scene(*ranks: RankFacts) -> NodeScene:
    return NodeScene(scene=scene(*ranks, world_size=8, now_s=50.0, is_whole=False), activities=(ACTIVITY,), question=4)


def test_a_letter_says_what_was_told_on_the_readers_clock() -> None:
    """100 s later on the reader's clock: every moment moves by that, no duration and no time of day does, and all else is equal."""
    got = read_message(open_message(pack(make_scene(FACTS))), later_s=100.0)
    fault = replace(FAULT, monotonic_s=140.0)
    evidence = replace(
        EVIDENCE, ops=(replace(EVIDENCE.ops[0], entered_s=141.0), EVIDENCE.ops[1]), step_s=142.0, dumped_s=143.0, stacks_s=144.0,
        handled={"MainThread": fault},
    )  # fmt: skip
    facts = replace(FACTS, ended_s=145.0, fault=fault, finished_s=146.0, evidence=evidence)
    assert got.scene.ranks == (facts,)
    assert (got.scene.now_s, got.activities, got.question, got.is_last) == (150.0, (ACTIVITY,), 4, False)


@pytest.mark.parametrize(
    ("kind", "moments", "others"),
    [
        (RankFacts, scene_file.MOMENTS[RankFacts], {"still_s"}),
        (Evidence, scene_file.MOMENTS[Evidence], set()),
        (Op, scene_file.MOMENTS[Op], set()),
        (FaultRecord, scene_file.MOMENTS[FaultRecord], {"timestamp_s"}),
        (Group, (), set()),
        (Child, (), {"still_s"}),
    ],
)
def test_no_moment_is_forgotten(kind: type, moments: tuple[str, ...], others: set[str]) -> None:
    """Whoever adds a time to the facts must say here whether it is a moment on the host's clock."""
    times = {field.name for field in fields(kind) if field.name.endswith("_s")}
    assert times == {*moments, *others}


def test_what_is_too_much_is_left_out_but_the_last_of_every_group() -> None:
    """Of 900 operations the last 200 stay, and of a group that has been quiet for long its last 8; never so few that a reader takes them for all."""
    old = [op(at=5, group="small", entered_s=float(seq)) for seq in range(1, 101)]
    new = [op(at=6, entered_s=100.0 + seq) for seq in range(1, 801)]
    message = read_message(open_message(pack(make_scene(rank(0, *old, *new)), most_ops=200)), later_s=0.0)
    evidence = message.scene.ranks[0].evidence
    assert evidence is not None
    assert [one.seq for one in evidence.ops if one.group == "small"] == list(range(93, 101))
    assert [one.seq for one in evidence.ops if one.group != "small"] == list(range(601, 801))


def test_a_letter_is_bounded() -> None:
    """8 ranks with full rings and groups of 8192 members: no message is longer than the bound."""
    ops = [op(at=seq % 50, entered_s=seq * 0.0371) for seq in range(1, 1025)]
    groups = {"default": Group(name="default", ranks=tuple(range(8192)), backend="gloo")}
    full = [rank(number, *ops) for number in range(8)]
    ranks = [replace(one, evidence=replace(one.evidence, groups=groups)) for one in full if one.evidence is not None]
    text = pack(make_scene(*ranks))
    assert len(text) <= multi_node_scene.MOST_BYTES
    back = read_message(open_message(text), later_s=0.0).scene.ranks[7].evidence
    assert back is not None
    assert back.groups == groups
    assert back.ops[-1].seq == 1024


def test_large_jobs_tell_less_of_each_rank() -> None:
    """All that is recorded up to 39 ranks; 200 operations, below which a reader would draw wrong conclusions, for any number."""
    assert [count_ops(size) for size in (2, 39, 64, 200, 8192)] == [1024, 1024, 625, 200, 200]


@pytest.mark.parametrize("text", ["", "no letter", "bm8gbGV0dGVy"])
def test_what_is_no_letter_is_refused(text: str) -> None:
    """A line of another program in the store is an error with a name, not a crash of the watch."""
    with pytest.raises(ValueError, match="not a message"):
        open_message(text)
    message = open_message(pack(make_scene(FACTS)))
    message["scene"]["ranks"][0]["ended_s"] = "soon"
    with pytest.raises(ValueError, match="no scene"):
        read_message(message, later_s=100.0)


def test_scenes_of_nodes_are_one() -> None:
    """Ranks of two nodes stand in one scene by their numbers; it is whole when none is missing, and its moment is ours."""
    own, other = (
        scene(rank(2), rank(3), world_size=4, now_s=9.0),
        scene(rank(0), rank(1), world_size=4, now_s=7.0),
    )
    joint = join(own, [other])
    assert [facts.rank for facts in joint.ranks] == [0, 1, 2, 3]
    assert (joint.is_whole, joint.now_s) == (True, 9.0)
    assert not join(own, []).is_whole


def test_a_group_of_more_ranks_than_any_job_has_is_refused() -> None:
    """A few bytes of another node can name 10^12 ranks: that is no scene, and fills no memory."""
    assert expand_runs([[0, 2], [5, 5]]) == [0, 1, 2, 5]
    for runs in ([[0, 10**12]], [[0, MOST_RANKS - 1]] * 3):
        with pytest.raises(ValueError, match="are known"):
            expand_runs(runs)
