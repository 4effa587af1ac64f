"""A fault of ours in the watch never ends somebody's job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from clocks import FakeClock
from rankwise.launcher import rank_sampler
from rankwise.launcher.job_monitor import HungElsewhere, JobMonitor
from rankwise.launcher.rendezvous.assignment import Assignment
from rankwise.verdict.case_file import write_findings
from rankwise.verdict.finding import JobFinding

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("method", ["look", "take_end", "take_last"])
def test_a_fault_in_the_watch_is_told_and_switches_it_off(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised becomes one line; the attempt goes on, is watched no more, and is not called hung."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a rule")

    said: list[str] = []
    clock = FakeClock()
    tower = _open(tmp_path, None, clock, said)
    monkeypatch.setattr(rank_sampler.RankSampler, method, fail)
    clock.sleep(1)
    tower.poll()
    tower.take_last(is_final=True)
    tower.take_end()
    tower.poll()
    assert (tower.has_hung, tower.next_in_s) == (False, float("inf"))
    assert "the job continues: ZeroDivisionError('a rule')" in said[0]
    assert not tower.is_left_behind


class FakeLink:
    """To nodes of which another judges; nothing is asked."""

    is_judge, asked, judge, node_rank = False, 0, 0, 1
    lost: str | None = None
    decision: str | None = None

    def __init__(self) -> None:
        self.questions: dict[int, float] = {}
        self.num_heard = 0

    def note_questions(self) -> None:
        return

    def wait_heard(self, what: str) -> None:
        assert what == "decision"
        self.num_heard += 1


def _open(tmp_path: Path, link: FakeLink | None, clock: FakeClock, said: list[str]) -> JobMonitor:
    spec = SimpleNamespace(watch=True, hang_timeout_s=None, on_hang=None, logs=SimpleNamespace(is_off=True))
    job = SimpleNamespace(
        spec=spec, clock=clock, serial=None, host_check=None, console=SimpleNamespace(say=said.append)
    )
    part = Assignment(
        world_size=2,
        role_world_size=2,
        master_addr="127.0.0.1",
        master_port=29500,
        run_id="job",
        link=cast("Any", link),
    )
    return JobMonitor(cast("Any", job), part, [], tmp_path)


def test_what_another_node_has_decided_ends_the_attempt_here_too(tmp_path: Path) -> None:
    """Its findings are ours, the attempt has hung, and the others hear, once, that we know it."""
    link, clock = FakeLink(), FakeClock()
    tower = _open(tmp_path, link, clock, [])
    tower.poll()
    assert not tower.has_hung
    finding = JobFinding(kind="hang", certainty="proof", rule="r", culprits=(0,), message="rank 0 sleeps", key="k")
    link.decision = write_findings([finding])
    with pytest.raises(HungElsewhere):
        tower.watch_on()
    tower.poll()
    assert (tower.has_hung, tower.decided, tower.findings, link.num_heard) == (
        True,
        (finding,),
        (finding,),
        1,
    )


def test_a_store_that_has_gone_is_told_once_and_not_at_a_jobs_end(tmp_path: Path) -> None:
    """Within three seconds a job may just be ending; after that one line says that only this node's ranks are watched."""
    link, clock, said = FakeLink(), FakeClock(), list[str]()
    tower = _open(tmp_path, link, clock, said)
    link.lost = "DistNetworkError: closed"
    for _ in range(4):
        tower.poll()
        clock.sleep(0.7)
    assert said == []
    for _ in range(8):
        tower.poll()
        clock.sleep(0.7)
    assert len(said) == 1
    assert "only the ranks of this one are watched: DistNetworkError: closed" in said[0]
