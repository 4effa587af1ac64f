"""TensorBoard and W&B get what was trained, once, at the right steps; and neither can end a training."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.base.errors import UsageError
from rankwise.train.events import Evaluated
from rankwise.train.loggers.tensorboard import TensorBoard
from rankwise.train.loggers.wandb import WandB
from told_training import ended, play, report, started

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]


def evaluated(step: int, **metrics: float) -> Evaluated:
    return Evaluated(step=step, epoch=0, metrics=metrics, seconds=0.5)


@pytest.mark.parametrize(("kind", "extra"), [(TensorBoard, "tensorboard"), (WandB, "wandb")])
def test_a_missing_package_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: Any, extra: str, tmp_path: Path
) -> None:
    """On every rank, before anything is trained, with the command that installs it."""
    monkeypatch.setattr(f"{kind.__module__}.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=f"needs the package {extra}") as caught:
        kind(str(tmp_path / "x"))
    assert f"pip install 'rankwise[{extra}]'" in str(caught.value)


def test_making_one_does_nothing(tmp_path: Path) -> None:
    """Every rank makes the object; only the one that trains opens files."""
    TensorBoard(tmp_path / "tb")
    WandB("project", folder=tmp_path / "run", dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------- TensorBoard


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Read a folder as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    points = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    for tag, some in points.items():
        assert len(some) == len(dict(some)), f"{tag}: a step twice in {some}"
    return {tag: dict(some) for tag, some in points.items()}


def test_tensorboard_shows_each_step(tmp_path: Path) -> None:
    """Losses, learning rates and norms of each step; speed and other means at the report; evaluations under eval/."""
    pytest.importorskip("tensorboard")
    play(
        TensorBoard(tmp_path),
        started(lr=0.5),
        report(2, 0.5, 0.25, lrs=(0.5, 0.125), grad_norms=(2.0, 1.0), metrics={"accuracy": 0.75}),
        evaluated(2, accuracy=0.875),
        report(3, 0.125, lrs=(), tokens_per_s=640.0),
        ended(3),
    )
    assert read_scalars(tmp_path) == {
        "train/loss": {1: 0.5, 2: 0.25, 3: 0.125},
        "train/lr": {1: 0.5, 2: 0.125},
        "train/grad_norm": {1: 2.0, 2: 1.0},
        "train/samples_per_s": {2: 40.0, 3: 40.0},
        "train/tokens_per_s": {3: 640.0},
        "train/accuracy": {2: 0.75},
        "eval/accuracy": {2: 0.875},
    }


def test_tensorboard_forgets_what_did_not_happen(tmp_path: Path) -> None:
    """After a kill and a resume from step 2 every step has one value, that of the training that went on; nothing before it is lost."""
    pytest.importorskip("tensorboard")
    code = f"""
import os, signal
from rankwise.train.loggers.tensorboard import TensorBoard
from told_training import play, report, started
play(TensorBoard({str(tmp_path)!r}), started(), report(2, 0.5, 0.5), report(4, 0.5, 0.5))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=TESTS, check=False, timeout=100).returncode == -9
    # Files are read in the order of their names, which begin with the second in which they were opened.
    first = next(tmp_path.glob("events*"))
    first.rename(first.with_name(first.name.replace("tfevents.1", "tfevents.0")))
    play(TensorBoard(tmp_path), started(step=2), report(4, 0.25, 0.25), report(5, 0.125), ended(5))
    assert read_scalars(tmp_path)["train/loss"] == {1: 0.5, 2: 0.5, 3: 0.25, 4: 0.25, 5: 0.125}


def test_a_folder_that_tensorboard_cannot_use_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One warning, and the training goes on."""
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    play(TensorBoard(tmp_path / "file" / "tb"), started(), report(1, 0.5), evaluated(1, a=1.0), ended(1))
    assert capsys.readouterr().err.count("rankwise: warning: [rank 0] nothing is written for TensorBoard") == 1


# ------------------------------------------------------------------------------------- W&B


class FakeRun:
    """What wandb.init returns, as far as it is used; remembers what it is told."""

    def __init__(self, id: str) -> None:  # noqa: A002 - the service's own word
        self.id, self.project, self.entity = id, "project", "me"
        self.rows: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.exit_code: int | None = None
        self.error: Exception | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a W&B in place that needs neither a network nor processes."""
    state = SimpleNamespace(calls=[], runs=[], error=None)

    def init(**options: Any) -> FakeRun:
        state.calls.append(options)
        if state.error is not None:
            raise state.error
        state.runs.append(FakeRun(options.get("id") or f"run{len(state.runs)}"))
        return state.runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=importlib.util.spec_from_loader("wandb", None)))  # fmt: skip
    return state


def test_wandb_hears_reports_and_evaluations(service: SimpleNamespace, tmp_path: Path) -> None:
    """Each with the number of our steps, over which W&B is told to draw everything."""
    play(
        WandB("project", tags=["x"], config={"mine": 1}, folder=tmp_path),
        started(lr=0.5),
        report(2, 0.5, 0.25, lrs=(0.5, 0.125), grad_norms=(2.0, 1.0), metrics={"accuracy": 0.75}),
        evaluated(2, accuracy=0.875),
        report(3, 0.125, lrs=(), tokens_per_s=640.0),
        ended(3),
    )
    [call], [run] = service.calls, service.runs
    assert call == {"project": "project", "tags": ["x"], "config": {"world_size": 2, "global_batch": 4, "lr": 0.5, "mine": 1}}  # fmt: skip
    assert run.metrics == [("step", None), ("*", "step")]
    assert run.rows == [
        {"step": 2, "train/loss": 0.375, "train/samples_per_s": 40.0, "train/epoch": 0, "train/lr": 0.125, "train/grad_norm": 1.0, "train/accuracy": 0.75},
        {"step": 2, "eval/accuracy": 0.875},
        {"step": 3, "train/loss": 0.125, "train/samples_per_s": 40.0, "train/epoch": 0, "train/tokens_per_s": 640.0},
    ]  # fmt: skip
    assert run.exit_code == 0


def test_a_training_that_goes_on_goes_on_in_its_run(service: SimpleNamespace, tmp_path: Path) -> None:
    """The run's id is kept in the training's folder; a new training there begins a new run."""
    folder = str(tmp_path / "run")
    play(WandB("p"), started(folder=folder), report(1, 0.5), ended(1, "SIGUSR1"))
    play(WandB("p"), started(step=1, folder=folder), report(2, 0.5), ended(2))
    play(WandB("p"), started(folder=folder))
    assert [(call.get("id"), call.get("resume")) for call in service.calls] == [
        (None, None),
        ("run0", "allow"),
        (None, None),
    ]
    assert [run.exit_code for run in service.runs] == [1, 0, None]
    assert json.loads((tmp_path / "run" / "wandb.json").read_text())["id"] == "run2"


@pytest.mark.parametrize("text", [None, "", "[]", "{}", "{"])
def test_an_id_that_cannot_be_read_begins_a_new_run(service: SimpleNamespace, tmp_path: Path, text: str | None) -> None:
    """A damaged or missing file costs the connection to the old run, not the training."""
    if text is not None:
        (tmp_path / "wandb.json").write_text(text)
    play(WandB("p", folder=tmp_path), started(step=3), report(4, 0.5))
    assert "id" not in service.calls[0]
    assert service.runs[0].rows[0]["step"] == 4


def test_an_id_of_the_users_is_left_alone(service: SimpleNamespace, tmp_path: Path) -> None:
    """Who names the run and how to resume gets just that."""
    play(WandB("p", folder=tmp_path, id="mine", resume="must"), started(step=3))
    assert (service.calls[0]["id"], service.calls[0]["resume"]) == ("mine", "must")


@pytest.mark.parametrize("moment", ["init", "log"])
def test_a_service_that_is_away_ends_nothing(
    service: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    """Whatever W&B raises, at the start or in the middle: one warning with its first line, and the training goes on."""
    error = RuntimeError("api_key not configured\nlong advice")
    logger = WandB("p", folder=tmp_path)
    if moment == "init":
        service.error = error
        play(logger, started())
    else:
        play(logger, started(), report(1, 0.5))
        service.runs[0].error = error
    play(logger, report(2, 0.5), evaluated(2, a=1.0), report(3, 0.5), ended(3))
    said = capsys.readouterr().err
    assert said.count("rankwise: warning: [rank 0] W&B:") == 1
    assert "RuntimeError: api_key not configured\n" in said


@pytest.mark.linux
def test_the_real_wandb_offline(tmp_path: Path) -> None:
    """Without a network the run is written to a file, with our steps, in one run over a resume; and no process stays behind."""
    pytest.importorskip("wandb")
    import psutil

    code = f"""
import sys
from rankwise.train.loggers.wandb import WandB
from told_training import ended, play, report, started
step = int(sys.argv[1])
play(WandB("p", dir={str(tmp_path)!r}), started(step=step, folder={str(tmp_path / "run")!r}), report(step + 1, 0.5), ended(step + 1))
"""
    env = {
        **os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path),
        "WANDB_DISABLE_CODE": "true", "RANKWISE_TEST_MARK": str(tmp_path),
    }  # fmt: skip
    for step in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code, step], cwd=TESTS, env=env, check=False, timeout=100, capture_output=True
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        assert b"warning" not in done.stderr
    left = [process for process in psutil.process_iter() if _has_mark(process, str(tmp_path))]
    _, alive = psutil.wait_procs(left, timeout=30)
    assert alive == []
    kept = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {f"run-{kept}.wandb"}
    logged = [row for file in files for row in _read_history(file)]
    assert sorted((row["step"], row["train/loss"]) for row in logged) == [(1, 0.5), (2, 0.5)]


def _has_mark(process: Any, mark: str) -> bool:
    import psutil

    try:
        return bool(process.environ().get("RANKWISE_TEST_MARK") == mark)
    except psutil.Error:
        return False


def _read_history(file: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _read_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})  # fmt: skip
    return rows


def _read_records(raw: bytes) -> Iterator[bytes]:
    """Take LevelDB's log format apart: blocks of 32 KiB; each piece has a checksum, its length, and whether it is a first, middle or last one."""
    at, whole = 7, b""
    while at + 7 <= len(raw):
        if 0x8000 - at % 0x8000 < 7:
            at += 0x8000 - at % 0x8000
            continue
        size, kind = struct.unpack_from("<HB", raw, at + 4)
        whole += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:
            yield whole
            whole = b""
