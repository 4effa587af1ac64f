"""Collectives that only some ranks make, under a condition of their own, and orders that are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankwise.verdict.run_rules import look
from scenes import ended, gradient, in_backward, in_call, op, rank, scene

if TYPE_CHECKING:
    from rankwise.evidence.reader.scene import Op, RankFacts
    from rankwise.verdict.finding import JobFinding

_OPEN = {"is_over": False}


def _look(*ranks: RankFacts, text: str = "", **facts: Any) -> tuple[JobFinding, ...]:
    return look(scene(*ranks, sources={"/job/train.py": text}, **facts))


def _loop(test: str) -> str:
    return f"for step in range(20):\n    loss = model(step)\n    loss.backward()\n    {test}\n        dist.barrier()\n"


@pytest.mark.parametrize(
    ("test", "class_id"),
    [
        ("if step % 5 == 0 and rank == 0:", "C1"),
        ("if time.monotonic() > deadline:", "C26"),
        ("if step == 7:", "D14"),
    ],
)
def test_a_barrier_under_a_condition_of_its_own_is_no_uneven_data(test: str, class_id: str) -> None:
    """It met gradients: the barrier is one too many, unless its condition holds on all ranks at the same step."""
    finding = _look(
        rank(0, gradient(3), gradient(3, **_OPEN), at=in_backward(3)),
        rank(1, gradient(3), op("barrier", at=5, **_OPEN), at=in_call("barrier", 5)),
        text=_loop(test),
    )[0]
    assert (finding.rule, finding.class_id) == ("mispaired_gradients", class_id)
    if class_id != "D14":
        assert (finding.culprits, finding.where) == ((1,), "/job/train.py:5")
        assert "train.py:4" in finding.fix or "line 4 of train.py" in finding.fix


_SIZES = "def compute():\n    dist.all_reduce(t)\nfor step in range(20):\n    dist.all_reduce(g)\n    {}\n        log(compute())\n"


@pytest.mark.parametrize(("test", "class_id"), [("if step % 5 == 4 and rank == 0:", "C1"), ("if step % 5 == 4:", "C8")])
def test_two_lines_of_unlike_sizes_are_two_collectives(test: str, class_id: str) -> None:
    """Equal shapes would not help there. Who is aborted by Gloo has no stack: then all calls of the function tell."""
    finding = _look(
        ended(0, op(at=4, shape=(30,)), op(at=2, shape=(2,), **_OPEN), code=-6),
        rank(1, op(at=4, shape=(30,)), op(at=4, shape=(30,), **_OPEN), at=in_call(at=4)),
        text=_SIZES.format(test),
    )[0]
    assert (finding.rule, finding.class_id) == ("other_size", class_id)
    assert "of different sizes" not in finding.message
    assert "same shape" not in finding.fix


def test_one_place_written_twice_is_still_a_matter_of_sizes() -> None:
    """Two arms of one condition make one collective."""
    finding = _look(
        rank(0, op(at=2, shape=(2,), **_OPEN), at=in_call(at=2)),
        rank(1, op(at=4, shape=(3,), **_OPEN), at=in_call(at=4)),
        text="if rank == 0:\n    dist.all_reduce(a)\nelse:\n    dist.all_reduce(b)\n",
    )[0]
    assert (finding.rule, finding.class_id) == ("other_size", "C5")


_UNSHARD = ("_call_impl", "_pre_forward", "pre_forward", "unshard", "foreach_all_gather")


@pytest.mark.parametrize("is_guarded", [False, True])
def test_fsdp_is_not_ddp(is_guarded: bool) -> None:
    """It gathers parameters before a forward pass. There is no .module to go around it by."""
    gather = {"shape": (89,), "inside": _UNSHARD}
    past = [] if is_guarded else [op("all_gather_into_tensor", at=2, **gather)]
    text = f"{'if is_main():' if is_guarded else 'for batch in data:'}\n    model(batch)\ndist.barrier()\n"
    finding = _look(
        rank(
            0,
            *past,
            op("all_gather_into_tensor", at=2, **gather, **_OPEN),
            at=in_call("all_gather_into_tensor", 2),
        ),
        rank(1, *past, op("barrier", at=3, **_OPEN), at=in_call("barrier", 3)),
        text=text,
    )[0]
    assert (finding.rule, finding.class_id) == ("forward_on_some", "C1" if is_guarded else "D14")
    assert "FSDP parameters" in finding.message
    assert "DDP " not in finding.message.replace("FSDP", "")
    assert "model.module" not in finding.fix


def _lines(*lines: int) -> list[Op]:
    return [op(at=line) for line in lines]


@pytest.mark.parametrize(
    ("one", "other", "is_swap"),
    [
        ((1, 2, 3), (2, 1, 3), True),
        ((1, 2), (2, 1), True),
        ((1, 2, 1, 2), (2, 1, 2, 1), True),
        ((3, 1, 2, 1, 2, 3), (3, 1, 2, 2, 1, 3), True),
        ((1, 2, 1, 2, 1), (1, 1, 2, 1, 2), False),
        ((1, 1, 1, 3, 1, 1, 1, 3), (1, 1, 3, 1, 1, 3, 1, 1), False),
    ],
)
def test_one_collective_more_is_no_opposite_order(one: tuple[int, ...], other: tuple[int, ...], is_swap: bool) -> None:
    """Ranks that swapped two are in step again behind them; who repeated one is a number behind from there on."""
    seen = _look(ended(0, *_lines(*one)), ended(1, *_lines(*other)), text="a()\nb()\nc()\n")
    assert [finding.rule for finding in seen] == ["swapped_order"] * is_swap


def test_helpers_that_take_turns_are_one_place() -> None:
    """Each turn makes one collective, by the one helper or the other; who calls both in either order has made two."""
    turns = "def a(): \n    dist.all_reduce(t)\ndef b():\n    dist.all_reduce(t)\nif (i + rank) % 2:\n    a()\nelse:\n    b()\n"
    both = turns.replace("    a()\nelse", "    a(); b()\nelse").replace("    b()\n", "    b(); a()\n")
    ranks = [ended(0, *_lines(2, 4)), ended(1, *_lines(4, 2))]
    assert _look(*ranks, text=turns) == ()
    assert [finding.rule for finding in _look(*ranks, text=both)] == ["swapped_order"]


def test_a_line_met_by_chance_does_not_end_the_way_back() -> None:
    """Rank 0 has one metric more in each epoch: they parted at #3, and at #7 both happened to be at one line."""
    one, other = (1, 1, 1, 2, 1, 1, 1, 2, 1, 1), (1, 1, 2, 1, 1, 2, 1, 1, 2)
    finding = _look(
        rank(0, *_lines(*one[:-1]), op(at=1, **_OPEN), at=in_call(at=1)),
        rank(1, *_lines(*other), op("barrier", at=3, **_OPEN), at=in_call("barrier", 3)),
        text="a()\nb()\nc()\n",
    )[0]
    assert finding.rule == "mispaired_calls"
    assert "at collective #3 " in finding.message
