"""The journal of a coordinator: what a process that is started again takes from it, and what not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.parallel.servers.journal import Journal, describe_call

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_results_are_found_again_up_to_one_that_is_cut(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves the results before; the next one writes behind them."""
    path = tmp_path / "journal"
    first = Journal(path, 1)
    assert not first.is_resumed
    first.add(0, "step(0)", 2, b"zero")
    first.add(2, "step(2)", 3, b"two")
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:10])
    second = Journal(path, 1)
    assert second.is_resumed
    assert len(second) == 2
    assert second.find(0, "step(0)") == (2, b"zero")
    assert second.find(1, "step(1)") is None
    second.add(1, "step(1)", 2, b"one")
    second.close()
    third = Journal(path, 1)
    third.close()
    assert [third.find(number, f"step({number})") for number in range(3)] == [
        (2, b"zero"),
        (2, b"one"),
        (3, b"two"),
    ]


def test_what_a_script_does_not_repeat_is_dropped_for_good(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the first other function on nothing is taken, by the process after the next neither; a warning names both functions."""
    path = tmp_path / "journal"
    first = Journal(path, 1)
    for number in range(4):
        first.add(number, f"step({number})", 2, b"old")
    first.close()
    second = Journal(path, 1)
    assert second.find(0, "step(0)") == (2, b"old")
    assert second.find(1, "evaluate()") is None
    assert second.find(2, "step(2)") is None
    assert "scheduled function 1 is evaluate() and was step(1)" in capfd.readouterr().err
    second.add(1, "evaluate()", 3, b"new")
    second.close()
    third = Journal(path, 1)
    third.close()
    assert third.find(1, "evaluate()") == (3, b"new")
    assert third.find(2, "step(2)") is None


def test_calls_are_described_alike_in_other_processes() -> None:
    """No address and no long value is in the words."""
    assert describe_call(describe_call, (1, "x", object(), [3])) == "describe_call(1, 'x', object, list)"
