"""Slurm's programs in trouble, played by small scripts: a job is neither forgotten nor left behind by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import rankwise
from clocks import FakeClock
from rankwise.base.errors import LaunchError
from rankwise.cli import jobs
from rankwise.cluster import handles, submission
from rankwise.cluster.cluster import JobState
from rankwise.cluster.following import PatientAsker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of Slurm's programs: sbatch takes any job as 42, scancel notes what it is asked, the controller is silent."""
    folder = tmp_path / "bin"
    folder.mkdir()
    silent = "echo 'Unable to contact slurm controller' >&2; exit 1"
    texts = {"sbatch": "echo 42", "scancel": f'echo "$@" >> {tmp_path}/cancelled', "scontrol": silent, "squeue": silent, "sacct": silent}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


def submit() -> submission.JobHandle:
    return rankwise.submit(["train.py"], on="slurm")


def test_a_controller_that_does_not_answer_ends_no_job(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`jobs` says that it is not known now, `--forget` keeps its record, `cancel` cancels it; one that Slurm has forgotten is over."""
    handle = submit()
    with pytest.raises(LaunchError, match="Unable to contact"):
        handle.state()
    assert jobs.main([]) == 0
    assert "not known now: can't ask for job 42" in " ".join(capsys.readouterr().out.split())
    assert jobs.main(["--forget"]) == 0
    assert f"{handle.id} is kept: it is unknown" in capsys.readouterr().out
    assert [one.id for one in handles.list_records()] == [handle.id]
    assert jobs.main_cancel(["42"]) == 0
    assert (tmp_path / "cancelled").read_text() == "42\n"
    (programs / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    assert handle.wait().phase == "unknown"


def test_a_job_whose_record_can_not_be_kept_is_taken_back(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would find it again."""
    kept, keep = [], handles.keep

    def fill_up(record: handles.JobRecord) -> None:
        if kept:
            raise LaunchError("the disk is full")
        kept.append(record)
        keep(record)

    assert programs.is_dir()
    monkeypatch.setattr(handles, "keep", fill_up)
    with pytest.raises(LaunchError, match="the disk is full"):
        submit()
    assert (tmp_path / "cancelled").read_text() == "42\n"
    assert handles.list_records() == []
    kept.clear()
    (programs / "scancel").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(LaunchError, match="job 42 is submitted, and can't be taken back"):
        submit()
    assert [one.name for one in handles.list_records()] == ["train"]


def test_who_follows_a_job_bears_a_scheduler_that_is_silent_for_minutes() -> None:
    """It is asked again; after five minutes its error is passed on, counted from its last answer."""
    clock, running = FakeClock(), JobState(phase="running")
    answers: list[JobState | None] = [None, running, None, None]

    def answer() -> JobState:
        found = answers.pop(0)
        if found is None:
            raise LaunchError("no answer")
        return found

    ask = PatientAsker(answer, clock)
    found = []
    for _ in range(3):
        clock.sleep(200)
        found.append(ask())
    assert found == [None, running, None]
    clock.sleep(200)
    with pytest.raises(LaunchError, match="no answer"):
        ask()
