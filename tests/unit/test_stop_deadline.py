"""When a job's time is over, as its environment tells it: with a clock that the test moves."""

from __future__ import annotations

import pytest

from rankwise import UsageError
from rankwise.runtime.stop_deadline import Deadline, find_deadline


class FakeClock:
    """A clock that stands still; its wall time can be set apart from the monotonic one."""

    def __init__(self) -> None:
        self.now_s, self.epoch_s = 1000.0, 1_800_000_000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.epoch_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test says what its environment tells."""
    for name in ("SLURM_JOB_END_TIME", "RANKWISE_DEADLINE"):
        monkeypatch.delenv(name, raising=False)


def find(**options: float | None) -> Deadline | None:
    return find_deadline(FakeClock(), rank=0, **{"after_s": None, "margin_s": 120.0, **options})  # type: ignore[arg-type]


def test_nothing_is_no_deadline() -> None:
    """Without a wish and without variables there is no deadline."""
    assert find() is None


def test_slurm_tells_the_end_and_the_margin_comes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end 3600 s from now with a margin of 120 s is a deadline in 3480 s, on the monotonic clock."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800003600")
    found = find()
    assert found is not None
    assert found.at_s == 1000 + 3480
    assert found.reason == "120 s are left until SLURM_JOB_END_TIME"


def test_the_earliest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the scheduler's end, the variable of others and the script's own wish the first one holds."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800003600")
    monkeypatch.setenv("RANKWISE_DEADLINE", "1800002000.5")
    found = find()
    assert found is not None
    assert found.at_s == 1000 + 1880.5
    found = find(after_s=60)
    assert found == Deadline(at_s=1060, reason="60 s are over")


def test_a_short_job_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin never takes more than half of the time: a job of one minute works for 30 s."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800000060")
    found = find()
    assert found is not None
    assert found.at_s == 1030


def test_a_deadline_that_is_past_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A time in the past would stop the job at each start: it is left out, with a warning."""
    monkeypatch.setenv("RANKWISE_DEADLINE", "1799999990")
    assert find() is None
    assert "RANKWISE_DEADLINE=1799999990 was 10 s ago" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["soon", "nan", "inf"])
def test_nonsense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no time names the variable and its value."""
    monkeypatch.setenv("RANKWISE_DEADLINE", text)
    with pytest.raises(UsageError, match=f"RANKWISE_DEADLINE='{text}'"):
        find()
    with pytest.raises(UsageError, match="after_s=-1"):
        find(after_s=-1)
