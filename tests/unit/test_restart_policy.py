"""What follows a failed attempt."""

from __future__ import annotations

from hypothesis import given, strategies as st

from rankwise.launcher.restart_policy import Failure, decide

_FAILURES = st.builds(
    Failure,
    message=st.sampled_from(["rank 1: ValueError: 3", "rank 0: ValueError: 4", "killed by SIGKILL"]),
    where=st.sampled_from([None, "a.py:1", "a.py:2"]),
    lasted_s=st.floats(min_value=0, max_value=1e6),
)


def _fail(message: str = "ValueError: boom", where: str | None = "a.py:1", lasted_s: float = 1.0) -> Failure:
    return Failure(message=message, where=where, lasted_s=lasted_s)


@given(st.lists(_FAILURES, min_size=1, max_size=30), st.integers(0, 20))
def test_never_more_attempts_than_allowed(failures: list[Failure], max_restarts: int) -> None:
    """However an endless job fails, it is started at most max_restarts + 1 times."""
    attempts = 1
    while decide((failures * 30)[:attempts], max_restarts) is None:
        attempts += 1
    assert attempts <= max_restarts + 1


@given(st.lists(_FAILURES, min_size=1, max_size=2), st.integers(3, 20))
def test_no_loop_is_seen_in_two_failures(failures: list[Failure], max_restarts: int) -> None:
    """Two failures are no loop: the restarts that the user allowed are used."""
    assert decide(failures, max_restarts) is None


@given(st.lists(st.floats(min_value=0, max_value=1e5), min_size=3, max_size=10), st.integers(20, 30))
def test_failures_without_a_place_are_no_loop(lasted: list[float], max_restarts: int) -> None:
    """Ranks killed from outside (preemption, memory) are started again as often as allowed."""
    failures = [_fail("killed by SIGKILL", None, seconds) for seconds in lasted]
    assert decide(failures, max_restarts) is None


def test_no_restarts_asked_for_is_no_reason() -> None:
    """Without --max-restarts there is nothing to explain."""
    assert decide([_fail()], 0) == ""


def test_used_up_restarts_are_told() -> None:
    """The last failure says that the restarts are used up."""
    decision = decide([_fail("a"), _fail("b")], 1)
    assert decision is not None
    assert decision == "the only restart is used up"
    assert decide([_fail("a"), _fail("b"), _fail("c")], 2) == "all 2 restarts are used up"


def test_the_same_failure_three_times_is_a_loop() -> None:
    """Same cause, same place, no progress: it stops early and says how many restarts are left."""
    decision = decide([_fail(), _fail(), _fail()], 9)
    assert decision is not None
    assert "7 more restarts would" in decision
    decision = decide([_fail(), _fail(), _fail()], 3)
    assert decision is not None
    assert "1 more restart would" in decision


def test_numbers_in_messages_are_ignored() -> None:
    """Another rank, port or pid does not make it another failure."""
    failures = [_fail(f"rank {number}: Error: port 2950{number}") for number in range(3)]
    assert decide(failures, 9)


def test_another_place_or_cause_is_no_loop() -> None:
    """A failure that moves is not the same failure."""
    assert decide([_fail(), _fail(), _fail(where="a.py:2")], 9) is None
    assert decide([_fail(), _fail(), _fail("KeyError: 'x'")], 9) is None


def test_progress_is_no_loop() -> None:
    """An attempt that ran much longer than the first resumed from somewhere and got further."""
    assert decide([_fail(lasted_s=60), _fail(lasted_s=60), _fail(lasted_s=3600)], 9) is None
    short = [_fail(lasted_s=60)] * 3
    assert decide([_fail(lasted_s=3600), *short], 9)


def test_long_attempts_are_no_loop() -> None:
    """A job that fails for the same cause every hour resumes from its checkpoints: its restarts help."""
    assert decide([_fail(lasted_s=seconds) for seconds in (3600, 3000, 3300)], 100) is None


def test_only_the_last_three_count() -> None:
    """An old failure of another kind does not hide a loop."""
    assert decide([_fail("other"), _fail(), _fail(), _fail()], 9)
