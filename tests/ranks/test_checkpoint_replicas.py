"""What all ranks have a copy of is saved as one rank has it, and never as a mixture."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise import checkpoint
from rankwise.base.errors import CheckpointError, UsageError
from rankwise.checkpoint import plan, reading, saving, writing
from rankwise.checkpoint.disk import REAL_DISK
from rankwise.testing.ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from pathlib import Path


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def test_batchnorm_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Each rank has running statistics of its own between two steps; a resumed run goes on as the one that never stopped."""

    def body(begin: int, end: int, *, resume: bool) -> tuple[list[float], list[Any]]:
        with rankwise.init(device="cpu") as ctx:
            model = rankwise.apply_ddp(build())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            state = {"model": model, "optimizer": optimizer}
            if resume:
                assert checkpoint.load(tmp_path, state) == begin
            losses = train(model, optimizer, range(begin, end), ctx.rank)
            if not resume:
                checkpoint.save(tmp_path, state, step=end)
                losses = train(model, optimizer, range(end, end + 3), ctx.rank)
            return losses, [value.tolist() for value in model.module.state_dict().values()]

    straight = run_ranks(lambda: body(0, 5, resume=False), 2)
    resumed = run_ranks(lambda: body(5, 8, resume=True), 2)
    assert resumed == straight


def test_copies_that_differ_come_from_one_rank(tmp_path: Path) -> None:
    """Nobody has promised that a bare model's tensors are equal: all of them are rank 0's, the large one too."""

    def body() -> None:
        plan._LARGE_BYTES = 64
        with rankwise.init(device="cpu") as ctx:
            mine = float(ctx.rank)
            model = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4))
            model[0].weight.data.fill_(mine)
            model[1].running_mean.fill_(mine)  # type: ignore[union-attr, operator]
            model[1].register_buffer("codebook", torch.full((4,), mine))
            checkpoint.save(tmp_path, {"bare": model, "as dict": {"nested": model[1].state_dict()}}, step=1)

    run_ranks(body, 3)
    found = checkpoint.read(tmp_path)
    assert found["bare"]["0.weight"].sum() == found["bare"]["1.running_mean"].sum() == 0
    # A module's own buffers: under DDP rank 0's count.
    assert found["as dict"]["nested"]["running_mean"].sum() == found["as dict"]["nested"]["codebook"].sum() == 0


def test_a_part_that_differs_is_told_once(tmp_path: Path) -> None:
    """Plain values that differ are kept for each rank; that this forbids another world size is said at the first save."""

    def body() -> str:
        with rankwise.init(device="cpu") as ctx, redirect_stderr(io.StringIO()) as said:
            same = {"a": 1, "b": 2} if ctx.rank else {"b": 2, "a": 1}
            for step in (1, 2):
                checkpoint.save(tmp_path, {"best": 0.5 + ctx.rank, "same": same}, step=step)
            return said.getvalue()

    first, second = run_ranks(body, 2)
    assert first.count("the part 'best' of the state differs between ranks") == 1
    assert "'same'" not in first
    assert second == ""


def test_tensors_and_arrays_that_differ_are_kept_by_rank(tmp_path: Path) -> None:
    """NumPy's generators and a buffer of each rank: as numbers that differ are, and not rank 0's for all, so that all drew alike."""
    np = pytest.importorskip("numpy")

    def body() -> tuple[list[str], list[float]]:
        with rankwise.init(device="cpu") as ctx, redirect_stderr(io.StringIO()) as said:
            np.random.seed(ctx.rank)
            buffer = torch.full((5,), float(ctx.rank))
            same = {"equal": torch.ones(3), "at": np.arange(4)}
            state = {"np": np.random.get_state(), "buffer": {"seen": buffer}, "same": same}
            checkpoint.save(tmp_path, state, step=1)
            drawn = np.random.rand()
            state["buffer"]["seen"] = torch.zeros(5)
            checkpoint.load(tmp_path, state)
            np.random.set_state(state["np"])
            again = np.random.rand()
            told = [line.split("'")[1] for line in said.getvalue().splitlines() if "differs between ranks" in line]
            return told, [drawn, again, float(state["buffer"]["seen"][0])]

    (told, first), (_, second) = run_ranks(body, 2)
    assert told == ["np", "buffer"]
    assert first[0] == first[1] != second[0] == second[1]
    assert [first[2], second[2]] == [0.0, 1.0]


@pytest.mark.parametrize("part", ["a.b", "a@1"])
def test_names_of_parts_can_not_collide(tmp_path: Path, part: str) -> None:
    """A part's name is the beginning of its tensors' names: one that could be another's is refused."""
    with pytest.raises(CheckpointError, match="a part of the state is named"):
        checkpoint.save(tmp_path, {part: torch.zeros(3), "a": {"b": torch.ones(3)}}, step=1)


class SlowDisk:
    """Takes its time for each operation."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __getattr__(self, name: str) -> Any:
        operation = getattr(REAL_DISK, name)

        def run(*args: Any) -> Any:
            time.sleep(self.delay_s)
            return operation(*args)

        return run


@pytest.mark.parametrize(("slow", "delay_s"), [(0, 0.4), (1, 1.2)])
def test_a_slow_disk_is_waited_for_while_it_works(tmp_path: Path, slow: int, delay_s: float) -> None:
    """A save that takes longer than ranks wait for each other is no failure, as long as something is done all the time."""

    def body() -> str:
        writing._BEAT_S = 0.0
        with rankwise.init(device="cpu", timeout_s=3.0) as ctx:
            if ctx.rank == slow:
                # Rank 0 has some twenty operations to do, rank 1 four: either is longer than 3 s.
                saving.DISK = SlowDisk(delay_s)
            return checkpoint.save(tmp_path, {"x": torch.zeros(9)}, step=1, background=True).wait().name

    assert run_ranks(body, 2) == ["step-1"] * 2


def test_a_rank_that_was_held_up_hears_how_it_ended(tmp_path: Path) -> None:
    """Rank 1 looks only when rank 0 has long said good-bye: what was said is still there."""

    def body() -> str:
        writing._FAREWELL_S = 0.05
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            if ctx.rank == 1:
                wait = writing._wait_words

                def wait_late(order: Any, keys: Any) -> Any:
                    while not list(tmp_path.glob("step-1")):
                        time.sleep(0.01)
                    time.sleep(0.3)
                    return wait(order, keys)

                writing._wait_words = wait_late
            return checkpoint.save(tmp_path, {"x": torch.zeros(9)}, step=1).wait().name

    assert run_ranks(body, 2) == ["step-1"] * 2


def test_trouble_with_old_checkpoints_is_no_failure(tmp_path: Path) -> None:
    """The new one is committed: that the old ones can't be listed or deleted is a warning, and all ranks go on."""

    def body() -> list[str]:
        with rankwise.init(device="cpu", timeout_s=10):
            checkpoint.save(tmp_path, {"x": torch.zeros(3)}, step=1)

            def refuse(_folder: Path) -> Any:
                raise CheckpointError("can't look")

            writing.list_checkpoints = refuse  # type: ignore[attr-defined]
            keep = checkpoint.Keep(last=1)
            return [checkpoint.save(tmp_path, {"x": torch.zeros(3)}, step=2, keep=keep).wait().name]

    assert run_ranks(body, 2) == [["step-2"]] * 2


def test_an_error_of_the_device_while_reading_is_told_to_all(tmp_path: Path) -> None:
    """One rank has no memory for what it reads: the others hear of it at once, and nobody falls back to an older step."""

    def body() -> None:
        with rankwise.init(device="cpu", timeout_s=20) as ctx:
            for step in (1, 2):
                checkpoint.save(tmp_path, {"x": torch.zeros(3)}, step=step)
            if ctx.rank == 1:

                def fail(*_args: Any) -> None:
                    raise RuntimeError("out of memory")

                reading._deliver = fail
            checkpoint.load(tmp_path, {"x": torch.zeros(3)})

    first, second = try_ranks(body, 2)
    assert "[rank 1] RuntimeError: out of memory" in str(first.error)
    assert str(second.error) == "out of memory"


def test_the_best_needs_its_metric(tmp_path: Path) -> None:
    """A misspelt metric would let the best be deleted: it is refused, on all ranks, before anything is written."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            keep = checkpoint.Keep(last=1, best=1, metric="val_loss")
            told = "judges by the metric 'val_loss', but there is loss"
            with pytest.raises((UsageError, CheckpointError), match=told):
                checkpoint.save(tmp_path, {"x": 1}, step=1, keep=keep, metrics={"loss": 1.0})

    run_ranks(body, 2)
    assert not list(tmp_path.glob("step-*"))


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that changes its folder while a save is in the background changes nothing for it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    gate = threading.Event()

    class Waiting(SlowDisk):
        def write(self, fd: int, data: memoryview) -> int:
            gate.wait(20)
            return REAL_DISK.write(fd, data)

    monkeypatch.setattr(saving, "DISK", Waiting(0.0))
    started = checkpoint.save("run", {"x": torch.zeros(3)}, step=1, background=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.set()
    assert started.wait() == tmp_path / "run" / "step-1"


def test_a_copy_of_the_folder_does_not_free_its_lock(tmp_path: Path) -> None:
    """A backup that the training process itself makes opens and closes the lock's file: the folder stays ours."""
    checkpoint.save(tmp_path / "run", {"x": 1}, step=1)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    code = "import sys; from rankwise import checkpoint; checkpoint.save(sys.argv[1], {'x': 1}, step=2)"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "another job writes checkpoints into" in done.stderr


def test_less_strict_loads_what_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With strict=False a model with another head takes what it has in common, and the rest is named."""
    old = nn.ModuleDict({"body": nn.Linear(2, 2), "old": nn.Linear(2, 2)})
    checkpoint.save(tmp_path, {"model": old}, step=1)
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "new": nn.Linear(2, 3)})
    with pytest.raises(CheckpointError, match=r"lacks new\.weight"):
        checkpoint.load(tmp_path, {"model": model})
    assert checkpoint.load(tmp_path, {"model": model}, strict=False) == 1
    said = capfd.readouterr().err
    assert "the checkpoint lacks new.weight, new.bias and the model lacks old.bias, old.weight" in said
    assert torch.equal(model["body"].weight, old["body"].weight)


def test_numbers_are_not_cut_off(tmp_path: Path) -> None:
    """A fraction does not fit into a whole number: a dtype of another kind is an error, and not a rounding."""
    model = nn.BatchNorm1d(2)
    state = {**model.state_dict(), "num_batches_tracked": torch.tensor(1.7)}
    checkpoint.save(tmp_path, {"model": state}, step=1)
    with pytest.raises(CheckpointError, match="num_batches_tracked is int64 here and float32 in the checkpoint"):
        checkpoint.load(tmp_path, {"model": model})


def test_loading_for_evaluation_leaves_the_generators(tmp_path: Path) -> None:
    """Without an optimizer nothing goes on: the random numbers of whoever loads weights stay their own."""
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters())}, step=1)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    checkpoint.load(tmp_path, {"model": model})
    assert torch.equal(torch.rand(2), expected)
