"""The journal and the table of steps: whole lines, and no step twice, whatever was killed before."""

from __future__ import annotations

import csv
import gc
import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rankwise.train.events import Evaluated, Started
from rankwise.train.loggers.csv_lines import CsvLines
from rankwise.train.loggers.json_lines import JsonLines, to_json
from told_training import FakeClock, ended, play, report, started


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


# ------------------------------------------------------------------------------------ journal


def test_the_journal_holds_every_field_of_every_event(tmp_path: Path) -> None:
    """Each event is a line with its kind, its time and all its fields."""
    path = tmp_path / "run" / "journal.jsonl"
    events = (
        started(folder="run", seed=None),
        report(2, 0.5, 0.25, grad_norms=(1.0, 2.0), metrics={"accuracy": 0.5}, norms={2: {"weight": 3.0}}),
        Evaluated(step=2, epoch=0, metrics={"accuracy": 0.75}, seconds=0.5, is_best=True),
        ended(2),
    )
    play(JsonLines(path, clock=FakeClock()), *events)
    lines = read_lines(path)
    assert [line["kind"] for line in lines] == ["started", "report", "evaluated", "ended"]
    for line, event in zip(lines, events, strict=True):
        assert line.pop("time") == 1767226600.0
        del line["kind"]
        expected = {field.name: getattr(event, field.name) for field in fields(event)}
        # JSON knows lists, and keys that are texts.
        assert line == json.loads(json.dumps(expected))


def test_numbers_that_json_lacks_are_strings(tmp_path: Path) -> None:
    """A loss that is NaN or infinite leaves a line that every JSON reader takes."""
    path = tmp_path / "journal.jsonl"
    play(JsonLines(path), started(limit=math.inf), report(3, math.nan, math.inf, -math.inf))
    first, second = read_lines(path)
    assert first["settings"] == {"limit": "Infinity"}
    assert second["losses"] == ["NaN", "Infinity", "-Infinity"]
    assert second["loss"] == "NaN"


def test_foreign_values_become_plain(tmp_path: Path) -> None:
    """Other mappings, numbers of other libraries and unknown objects in the settings don't break a line."""
    import numpy

    path = tmp_path / "journal.jsonl"
    settings = MappingProxyType({"count": numpy.int64(3), "path": tmp_path, "inner": MappingProxyType({"a": 1})})
    event = Started(step=0, num_steps=None, epoch=0, num_epochs=None, world_size=1, global_batch=1, settings=settings)
    play(JsonLines(path), event)
    assert read_lines(path)[0]["settings"] == {"count": 3, "path": str(tmp_path), "inner": {"a": 1}}
    assert json.loads(to_json({"a": {(1, 2): math.nan, "b": numpy.float32(math.inf)}})) == {
        "a": {"(1, 2)": "NaN", "b": "Infinity"}
    }


@given(cut=st.integers(0, 400))
def test_half_a_line_costs_that_line_only(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Wherever a kill has cut the file, the lines before and the lines after can be read."""
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.unlink(missing_ok=True)
    play(JsonLines(path), started(), report(1, 0.5))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    play(JsonLines(path), started(step=1), report(2, 0.25))
    lines = path.read_bytes().splitlines()
    readable = [line for line in lines if _is_json(line)]
    assert [json.loads(line)["step"] for line in readable[-2:]] == [1, 2]
    assert readable[:-2] == whole.splitlines()[: len(readable) - 2]
    assert len(lines) - len(readable) <= 1


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_a_killed_process_has_written_what_it_told(tmp_path: Path) -> None:
    """After SIGKILL the file holds all lines up to the last event: nothing waits in a buffer."""
    code = f"""
import os, signal
from rankwise.train.loggers.json_lines import JsonLines
from told_training import play, report, started
play(JsonLines({str(tmp_path / "journal.jsonl")!r}), started(), report(2, 0.5, 0.25))
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, check=False, timeout=60)
    assert done.returncode == -9
    assert [line["kind"] for line in read_lines(tmp_path / "journal.jsonl")] == ["started", "report"]


def test_a_full_disk_costs_lines_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be written is missing, with one warning; when there is room again, whole lines follow."""
    path = tmp_path / "journal.jsonl"
    logger = JsonLines(path)
    play(logger, started())
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:20]))
    play(logger, report(1, 0.5))

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    play(logger, report(2, 0.5))
    monkeypatch.setattr(os, "write", real)
    play(logger, report(3, 0.5), ended(3))
    lines = path.read_text().splitlines()
    assert [json.loads(lines[at])["kind"] for at in (0, 2, 3)] == ["started", "report", "ended"]
    assert len(lines) == 4
    assert capsys.readouterr().err.count("rankwise: warning: [rank 0] lines are missing in the journal") == 1


def test_files_are_closed_at_the_end(tmp_path: Path) -> None:
    """No descriptor stays open, and the same object can hear of another training."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()  # noqa: PTH112, PTH208
    for logger in (JsonLines(tmp_path / "a"), CsvLines(tmp_path / "b")):
        for _ in range(2):
            play(logger, started(), report(1, 0.5), ended(1))
    if before:
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert len(read_lines(tmp_path / "a")) == 6
    assert len((tmp_path / "b").read_text().splitlines()) == 2


# ---------------------------------------------------------------------------------- table of steps

HEADER = "step,epoch,samples,loss,lr,grad_norm"


def evaluated(step: int, **metrics: float) -> Evaluated:
    return Evaluated(step=step, epoch=0, metrics=metrics, seconds=0.5)


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def read_rows(path: Path) -> list[list[str]]:
    header, *rows = path.read_text().splitlines()
    assert header == HEADER
    return [row.split(",") for row in rows]


def test_a_row_for_each_step(tmp_path: Path) -> None:
    """Every step has its loss and learning rate with all digits; what is not known is empty."""
    path = tmp_path / "run" / "steps.csv"
    play(
        CsvLines(path), started(),
        report(2, 0.1, 1 / 3, lrs=(0.1, 0.2)),
        report(4, math.nan, math.inf, epoch=1, epochs=(0, 1), lrs=(0.3, 0.4), grad_norms=(1.5, 2.5)),
    )  # fmt: skip
    assert read_rows(path) == [
        ["1", "0", "", "0.1", "0.1", ""],
        ["2", "0", "8", repr(1 / 3), "0.2", ""],
        ["3", "0", "", "nan", "0.3", "1.5"],
        ["4", "1", "16", "inf", "0.4", "2.5"],
    ]


@settings(deadline=None)
@given(told=st.integers(1, 12), resume=st.integers(1, 12), cut=st.integers(0, 30), more=st.integers(1, 5))
def test_no_step_is_there_twice(
    tmp_path_factory: pytest.TempPathFactory, told: int, resume: int, cut: int, more: int
) -> None:
    """After a kill and a resume from an earlier step the rows are those of the steps that happened, in order; in all tables."""
    path = tmp_path_factory.getbasetemp() / "steps.csv"
    resume = min(resume, told)
    before = [event for step in range(1, told + 1) for event in (report(step, 1.0), evaluated(step, a=1.0))]
    play(CsvLines(path), started(), *before)
    whole = path.read_bytes()
    # A kill may lose the end of the file only behind the checkpoint's step, if the disk keeps what it was given.
    safe = len(b"".join(whole.splitlines(keepends=True)[: resume + 1]))
    path.write_bytes(whole[: max(safe, len(whole) - cut)])
    play(CsvLines(path), started(step=resume), *[report(resume + at, 2.0) for at in range(1, more + 1)])
    rows = read_rows(path)
    assert [int(row[0]) for row in rows] == list(range(1, resume + more + 1))
    assert [row[3] for row in rows] == ["1.0"] * resume + ["2.0"] * more
    assert [row["step"] for row in read_table(path.with_name("reports.csv"))] == [row[0] for row in rows]
    evaluations = read_table(path.with_name("evaluations.csv"))
    assert [row["step"] for row in evaluations] == [row[0] for row in rows[:resume]]


def test_reports_and_evaluations_have_tables(tmp_path: Path) -> None:
    """Each metric has a column; one that comes up later is empty in the rows before, and names and numbers come back as they were."""
    odd = 'a "b", c'
    play(
        CsvLines(tmp_path / "steps.csv"), started(),
        report(2, 0.1, 0.3, loss=0.2, lrs=(0.5, 0.25), metrics={"accuracy": 1 / 3}),
        evaluated(2, accuracy=0.5, loss=math.nan),
        report(3, 0.5, tokens_per_s=640.0, lrs=(), metrics={"accuracy": math.inf, odd: 2.0, "lr": 7.0}),
        evaluated(3, accuracy=0.75, f1=1.0, epoch_=3.0),
        ended(3),
    )  # fmt: skip
    shared = {"epoch": "0", "samples_per_s": "40.0"}
    assert read_table(tmp_path / "reports.csv") == [
        {**shared, "step": "2", "loss": "0.2", "lr": "0.25", "tokens_per_s": "", "accuracy": repr(1 / 3), odd: "", "metric lr": ""},
        {**shared, "step": "3", "loss": "0.5", "lr": "", "tokens_per_s": "640.0", "accuracy": "inf", odd: "2.0", "metric lr": "7.0"},
    ]  # fmt: skip
    assert read_table(tmp_path / "evaluations.csv") == [
        {"step": "2", "epoch": "0", "accuracy": "0.5", "loss": "nan", "f1": "", "epoch_": ""},
        {"step": "3", "epoch": "0", "accuracy": "0.75", "loss": "", "f1": "1.0", "epoch_": "3.0"},
    ]


def test_a_training_that_goes_on_keeps_the_columns(tmp_path: Path) -> None:
    """After a resume the metrics of before have their columns still, and new ones get theirs; a new training has its own only."""
    path = tmp_path / "evaluations.csv"
    play(CsvLines(tmp_path / "steps.csv"), started(), evaluated(1, a=1.0), evaluated(2, a=2.0))
    play(CsvLines(tmp_path / "steps.csv"), started(step=1), evaluated(2, b=3.0))
    assert path.read_text().splitlines() == ["step,epoch,a,b", "1,0,1.0,", "2,0,,3.0"]
    play(CsvLines(tmp_path / "steps.csv"), started(), evaluated(1, b=4.0))
    assert path.read_text().splitlines() == ["step,epoch,b", "1,0,4.0"]
    play(CsvLines(tmp_path / "steps.csv"), started())
    assert path.read_text().splitlines() == ["step,epoch"]


def test_tables_that_nobody_fills_are_not_there(tmp_path: Path) -> None:
    """Without an evaluation there is no table of evaluations; another name of the first table names the others."""
    play(CsvLines(tmp_path / "steps.csv"), started(), ended(0))
    assert [one.name for one in tmp_path.iterdir()] == ["steps.csv"]
    play(CsvLines(tmp_path / "mine.csv"), started(), report(1, 0.5), evaluated(1, a=1.0), ended(1))
    assert sorted(one.name for one in tmp_path.glob("mine*")) == [
        "mine.csv",
        "mine_evaluations.csv",
        "mine_reports.csv",
    ]


def test_a_new_training_begins_a_new_table(tmp_path: Path) -> None:
    """Step 0 means that nothing in the old file happened in this run."""
    path = tmp_path / "steps.csv"
    play(CsvLines(path), started(), report(3, 0.1, 0.2, 0.3))
    play(CsvLines(path), started())
    assert read_rows(path) == []


@pytest.mark.parametrize("step", [0, 5])
def test_a_foreign_table_is_put_aside(step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with other columns is neither cut nor lost, whether a training begins or goes on; nor is the one put aside before."""
    path = tmp_path / "steps.csv"
    texts = ["a,b\n1,2\n", "c\n3\n", "a\rb\n", "x" * 200_000]
    for text, kept in zip(texts, ["steps.csv.old", *(f"steps.csv.old-{number}" for number in (2, 3, 4))], strict=True):
        path.write_bytes(text.encode())
        play(CsvLines(path), started(step=step), report(step + 1, 0.1))
        assert [row[0] for row in read_rows(path)] == [str(step + 1)]
        assert (tmp_path / kept).read_bytes() == text.encode()
        assert f"it is now called {kept}" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that don't fit are taken back whole, with one warning; later ones follow."""
    path = tmp_path / "steps.csv"
    logger = CsvLines(path)
    play(logger, started(), report(1, 0.5))
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    play(logger, report(2, 0.25), report(3, 0.25))
    monkeypatch.setattr(os, "write", real)
    play(logger, report(4, 0.125))
    assert [row[0] for row in read_rows(path)] == ["1", "4"]
    assert capsys.readouterr().err.count("rankwise: warning: [rank 0] rows are missing") == 1


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path below a file: one warning each, and the training goes on."""
    (tmp_path / "file").write_text("")
    for logger in (JsonLines(tmp_path / "file" / "a"), CsvLines(tmp_path / "file" / "b")):
        play(logger, started(), report(1, 0.5), report(2, 0.5), ended(2))
    assert capsys.readouterr().err.count("rankwise: warning:") == 2


def test_a_dropped_training_keeps_no_descriptor(tmp_path: Path) -> None:
    """In a notebook a training may be left by an error and built anew, a hundred times."""
    gc.collect()
    before = {*Path("/proc/self/fd").iterdir()}
    for _ in range(3):
        play(CsvLines(tmp_path / "steps.csv"), started(), report(1, 0.5), evaluated(1, a=1.0))
        play(JsonLines(tmp_path / "journal.jsonl"), started(), report(1, 0.5))
    gc.collect()
    assert len({*Path("/proc/self/fd").iterdir()}) == len(before)
