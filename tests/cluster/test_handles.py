"""What is kept of a job: found again by id, by its beginning, by name, or by the scheduler's id."""

from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING

import pytest

from rankwise.base.errors import LaunchError, UsageError
from rankwise.cluster import handles
from rankwise.cluster.handles import JobRecord
from rankwise.cluster.submission import select_rank
from rankwise.cluster.tools import run_tool

if TYPE_CHECKING:
    from pathlib import Path


def keep(job_id: str, **more: object) -> JobRecord:
    record = JobRecord(id=job_id, on="slurm", name="digits", folder=handles.open_folder(job_id), **more)  # type: ignore[arg-type]
    handles.keep(record)
    return record


def test_jobs_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is read as it was kept; nobody else may read it; an unreadable one hides no others."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    one = keep("digits-aa11", native_id="7", facts={"log": "x"}, submitted_s=1.0)
    two = keep("digits-bb22", native_id="8", submitted_s=2.0)
    handles.open_folder("broken-cc33").joinpath("record.json").write_text("{")
    assert handles.list_records() == [one, two]
    assert stat.S_IMODE(handles.jobs_folder().stat().st_mode) == 0o700
    assert [handles.find_record(text) for text in ("digits-aa11", "7", "digits-b")] == [one, one, two]
    with pytest.raises(UsageError, match="'digits' may be any of digits-aa11, digits-bb22"):
        handles.find_record("digits")
    with pytest.raises(UsageError, match=r"there is no job 'digits-aa12'\n  -> did you mean digits-aa11"):
        handles.find_record("digits-aa12")


@pytest.mark.parametrize("name", ["digits", "My Job_2", "2nd", "...", "x" * 60])
def test_an_id_can_be_a_host_name(name: str) -> None:
    """Kubernetes takes it as it is, however the job is called."""
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])", handles.make_id(name))


def test_lines_of_one_rank_are_chosen_by_their_prefix() -> None:
    """The launchers' own lines belong to no rank."""
    lines = ["[a rank 0]: x", "rankwise: y", "[b.c rank 10]: z", "[b.c rank 1]: [a rank 0]: w"]
    assert list(select_rank(iter(lines), None)) == lines
    assert list(select_rank(iter(lines), 1)) == lines[3:]


def test_a_scheduler_is_quoted() -> None:
    """What its program says is passed on; that it is not here is an error of usage, which nothing was started by."""
    with pytest.raises(LaunchError, match="can't submit the job: sh exits with 3:\n  no such partition\n  -> look"):  # fmt: skip
        run_tool(["sh", "-c", "echo no such partition >&2; exit 3"], doing="submit the job", hint="look")
    with pytest.raises(UsageError, match="can't submit the job: sbatch-is-not-here: No such file"):
        run_tool(["sbatch-is-not-here"], doing="submit the job")
    assert run_tool(["cat"], doing="copy", stdin="x") == "x"
