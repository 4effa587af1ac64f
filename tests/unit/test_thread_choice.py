"""Which thread tells what a rank does: the main one, unless it waits for another of its own."""

from __future__ import annotations

import pytest

from rankwise.evidence.reader.notes import Frame, Stack
from rankwise.evidence.reader.scene import Evidence, Op
from rankwise.evidence.reader.thread_choice import choose_stack, find_collectives

_USERS = Frame(file="/x/train.py", line=7, function="work")
_BEGIN = (
    Frame(file="/usr/lib/python3.11/threading.py", line=1, function="run"),
    Frame(file="/usr/lib/python3.11/threading.py", line=2, function="_bootstrap"),
)
_COLLECTIVE = Frame(file="/x/site-packages/torch/distributed/distributed_c10d.py", line=1, function="all_reduce")


def _main(*inside: tuple[str, str]) -> Stack:
    frames = [Frame(file=f"/usr/lib/python3.11/{file}", line=1, function=function) for file, function in inside]
    return Stack(frames=(*frames, Frame(file="/x/train.py", line=20, function="<module>")))


JOINS = _main(("threading.py", "_wait_for_tstate_lock"), ("threading.py", "join"))
AWAITS = _main(("threading.py", "wait"), ("concurrent/futures/_base.py", "result"))
PAUSES = _main(("threading.py", "wait"))
REDUCES = Stack(frames=(_COLLECTIVE, _USERS, *_BEGIN))
SLEEPS = Stack(frames=(_USERS, *_BEGIN))
PINS = Stack(
    frames=(
        Frame(file="/x/site-packages/torch/utils/data/_utils/pin_memory.py", line=1, function="do_one_step"),
        *_BEGIN,
    )
)
OPEN, OVER = (Op(group="0", seq=1, name="all_reduce", is_over=is_over) for is_over in (False, True))


def _told(main: Stack, *others: Stack, op: Op = OPEN) -> Evidence:
    stacks = {"MainThread": main, **{f"Thread-{number}": stack for number, stack in enumerate(others)}}
    return Evidence(ops=(op,), stacks=stacks)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        pytest.param(_told(JOINS, REDUCES), REDUCES, id="joins one in a collective"),
        pytest.param(_told(AWAITS, SLEEPS, REDUCES), REDUCES, id="awaits the result of one of two"),
        pytest.param(_told(JOINS, SLEEPS, op=OVER), SLEEPS, id="joins one that sleeps"),
        pytest.param(_told(JOINS, SLEEPS, SLEEPS, op=OVER), JOINS, id="joins one of two that sleep"),
        pytest.param(_told(JOINS, PINS, op=OVER), JOINS, id="torch's own thread"),
        pytest.param(_told(PAUSES, REDUCES), PAUSES, id="waits for an event, and may go on"),
        pytest.param(_told(SLEEPS, REDUCES), SLEEPS, id="works beside it"),
        pytest.param(Evidence(), None, id="was not asked"),
    ],
)
def test_a_main_thread_that_waits_for_another_one_tells_nothing(evidence: Evidence, expected: Stack | None) -> None:
    """Only then another thread's stack stands for the rank; one that may go on by itself stands for itself."""
    assert choose_stack(evidence) == expected


def test_a_thread_in_a_collective_that_is_over_waits_for_nobody() -> None:
    """The records must have one that is not over, and the thread must run the user's code."""
    assert find_collectives(_told(PAUSES, REDUCES, PINS)) == [REDUCES]
    assert find_collectives(_told(PAUSES, REDUCES, op=OVER)) == []


def test_a_thread_is_no_farewell() -> None:
    """A thread's stack begins elsewhere than the script, which is not over for that."""
    assert not REDUCES.is_farewell
