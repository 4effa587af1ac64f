"""What speaks against a proof: other threads, worlds that are not the launcher's, ranks that may still come, one collective on two lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankwise.evidence.facts import Group, RankFacts
from rankwise.evidence.notes import Frame, Stack
from rankwise.verdict.arms import are_alternatives
from rankwise.verdict.look import look
from scenes import elsewhere, ended, in_call, op, rank, scene, stack

_OPEN = {"is_over": False}
_BRANCHES = "\n" * 4 + "if rank == src:\n    broadcast(x, src)\nelse:\n    broadcast(y, src)\n"


def _circle() -> tuple[RankFacts, RankFacts]:
    return (
        rank(0, op("recv", peer=1, **_OPEN), at=in_call("recv", 7)),
        rank(1, op("recv", peer=0, **_OPEN), at=in_call("recv", 8)),
    )


def _with_thread(facts: RankFacts, at: Stack) -> RankFacts:
    assert facts.evidence is not None
    return replace(facts, evidence=replace(facts.evidence, stacks={"MainThread": at, "feeder": at}))


def test_a_circle_is_no_proof_where_another_thread_may_send() -> None:
    """A feeder thread sleeps, and then sends what the others wait for."""
    some, other = _circle()
    assert look(scene(some, other))[0].is_proof
    told = look(scene(_with_thread(some, elsewhere(12)), other))
    assert told
    assert not any(sight.is_proof for sight in told)


def test_a_thread_of_a_library_does_not_count() -> None:
    """A progress bar's thread sends nothing."""
    library = Stack(
        frames=(Frame(file="/env/lib/python3.11/site-packages/tqdm/_monitor.py", line=69, function="run"),)
    )
    some, other = _circle()
    assert look(scene(_with_thread(some, library), other))[0].is_proof


def test_ranks_that_are_numbered_otherwise_are_not_judged() -> None:
    """init_process_group(rank=W - 1 - RANK), or two worlds of one launch: nobody knows whose records belong together."""

    def numbered(number: int, own: int, shape: tuple[int, ...]) -> RankFacts:
        group = Group(name="0", ranks=(0, 1), backend="gloo", own=own)
        return rank(number, op("all_gather", shape=shape, **_OPEN), at=in_call("all_gather"), groups=(group,))

    assert look(scene(numbered(0, 0, (2,)), numbered(1, 1, (3,))))[0].is_proof
    assert look(scene(numbered(0, 1, (2,)), numbered(1, 0, (3,)))) == ()


def test_a_world_may_be_smaller_than_the_launch() -> None:
    """Rank 2 has ended, as it is not needed; rank 1 computes something before it meets rank 0."""
    init = stack(
        (
            "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
            1700,
            "init_process_group",
        ),
        at=5,
    )
    waits = rank(0, at=init, world=3, has_joined=False)
    gone = ended(2, world=3, has_joined=False)
    computes = rank(1, at=None, world=3, has_joined=False, is_asleep=False)
    assert not any(sight.is_proof for sight in look(scene(waits, computes, gone)))
    waits_too = rank(1, at=init, world=3, has_joined=False)
    assert any(sight.is_proof for sight in look(scene(waits, waits_too, gone)))


@pytest.mark.parametrize("roots", [(0, 1), (0, 0)])
def test_one_collective_on_two_lines_is_no_order(roots: tuple[int, int]) -> None:
    """Each rank is the root in its turn, and comes by another line than the others; or one has no data, and adds zeros."""
    first, second = roots
    some = rank(0, op("broadcast", at=6, root=first), op("broadcast", at=8, root=second))
    other = rank(1, op("broadcast", at=8, root=first), op("broadcast", at=6, root=second))
    assert look(scene(some, other, sources={"/job/train.py": _BRANCHES})) == ()


def test_without_the_script_nobody_can_tell() -> None:
    """The lines alone may be two arms of one condition."""
    assert look(scene(rank(0, op(at=6), op(at=7)), rank(1, op(at=7), op(at=6)))) == ()


def test_arms_are_found_at_any_depth() -> None:
    """An if in an else, a match, and what no Python is."""
    nested = "if a:\n    f()\nelif b:\n    g()\nelse:\n    h()\nk()\n"
    assert are_alternatives(nested, 2, 4)
    assert are_alternatives(nested, 4, 6)
    assert not are_alternatives(nested, 2, 7)
    assert not are_alternatives(nested, 2, 2)
    cases = "match a:\n    case 1:\n        f()\n    case _:\n        g()\n"
    assert are_alternatives(cases, 3, 5)
    assert not are_alternatives("if", 1, 2)
