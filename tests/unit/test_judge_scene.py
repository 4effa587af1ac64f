"""What is said of ranks that we only look at, where the rules see nothing: silence is told as what it is."""

from __future__ import annotations

import pytest

from rankwise.evidence.reader.scene import Evidence
from rankwise.verdict.judge_scene import can_tell, fold, judge_scene, say
from scenes import elsewhere, in_backward, in_call, rank, scene

STACK_ONLY = Evidence(has_joined=True)


def seen(number: int, stack: object, **facts: object) -> object:
    return rank(number, at=stack, evidence=STACK_ONLY, **facts)  # type: ignore[arg-type]


def test_ranks_that_wait_for_another_host_are_no_all_clear() -> None:
    """All ranks of this host wait: it is said that others are to be looked at, and that silence means nothing."""
    there = scene(seen(0, in_call()), seen(1, in_call()), world_size=4, is_whole=False)
    verdict = judge_scene(there)
    assert (verdict.kind, verdict.culprits, can_tell(there)) == ("ok", (), False)
    assert verdict.message.startswith("all ranks seen here are waiting; the job's other ranks")


def test_all_ranks_in_one_collective_are_told_as_that() -> None:
    """Nobody keeps anybody waiting there, but the network may."""
    verdict = judge_scene(scene(seen(0, in_call()), seen(1, in_call())))
    assert (verdict.kind, "network" in verdict.message) == ("ok", True)


def test_ranks_that_wait_apart_hang_only_if_they_do_not_move() -> None:
    """A rank in backward and one in a line's all_reduce: a hang if both are still, nothing if one moves."""
    still = [seen(0, in_backward()), seen(1, in_call(at=9))]
    assert judge_scene(scene(*still)).kind == "hang"
    moving = [seen(0, in_call(at=7), is_asleep=False), seen(1, in_call(at=9))]
    assert judge_scene(scene(*moving)).kind == "ok"


@pytest.mark.parametrize(("share", "kind"), [(0.98, "ok"), (0.0, "hang")])
def test_a_rank_at_work_is_slow_and_one_that_sleeps_is_not(share: float, kind: str) -> None:
    """The same stacks: CPU time decides between them, and both name the rank."""
    facts = {"is_asleep": share == 0.0}
    found = scene(seen(0, in_call()), seen(1, in_call()), seen(2, elsewhere(), **facts))
    verdict = judge_scene(found)
    assert (verdict.kind, verdict.culprits) == (kind, (2,))
    assert ("just be slow" in verdict.message) == (kind == "ok")
    # Stacks alone prove no hang: the rank may sleep for a while in each step.
    assert say(verdict, is_now=True).startswith("rankwise: the job may hang\n") == (kind == "hang")


def test_places_are_folded_the_smallest_group_first_and_counted_beyond_twelve() -> None:
    """Two ranks of one place are one line; of thirty places twelve are shown."""
    ranks = [seen(number, elsewhere(at=number // 2)) for number in range(60)]
    lines = fold(scene(*ranks))
    assert (lines[0], len(lines), lines[-1]) == ("ranks 0, 1: at train.py:0", 13, "and 18 more places")
    assert fold(scene(*ranks[:26]))[-1] == "and 1 more place"


def test_nothing_known_is_said() -> None:
    """Ranks without stacks and records."""
    found = scene(seen(0, None), seen(1, None))
    assert not can_tell(found)
    assert (
        say(judge_scene(found)).splitlines()[0] == "rankwise: without stacks it is not known which rank waits for which"
    )
