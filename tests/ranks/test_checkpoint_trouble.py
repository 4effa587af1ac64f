"""A save in the background that fails is told on all ranks, at one step, and training can go on."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise
from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint import saving
from rankwise.checkpoint.disk import REAL_DISK
from rankwise.testing.ranks import run_ranks


class FullDisk:
    """Refuses every write, once it is let."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL_DISK, name)

    def write(self, _fd: int, _data: memoryview) -> int:
        self.gate.wait(20)
        raise OSError(errno.ENOSPC, "No space left on device")


def train(folder: str, bad_rank: int) -> tuple[int, str, list[str]]:
    """Take steps until the error comes; the fast rank is steps ahead where nothing holds it back."""
    with rankwise.init(device="cpu", timeout_s=30) as ctx:
        gate = threading.Event()
        state = {"x": torch.ones(4)}
        checkpoint.save(folder, state, step=1)
        if ctx.rank == bad_rank:
            saving.DISK = FullDisk(gate)
        started = checkpoint.save(folder, state, step=2, background=True)
        said, step = "", 2
        try:
            for step in range(3, 100_000):
                rankwise.all_reduce(torch.ones(1))
                if step == 5:
                    gate.set()
                if ctx.rank and step > 5:
                    started._done.wait(0.001)  # out of step with rank 0, within what a collective allows
                checkpoint.check()
        except CheckpointError as error:
            said = str(error)
        saving.DISK = REAL_DISK
        state["x"] += 1
        checkpoint.save(folder, state, step=step + 1)
        return step, said, [path.name for path in sorted(Path(folder).glob("step-*"))]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_ranks_hear_at_one_step_that_a_save_failed(tmp_path: Path, bad_rank: int) -> None:
    """The disk of one rank is full: every rank raises at the same step and names it; the next save works, nothing is left."""
    outcomes = run_ranks(train, 3, str(tmp_path), bad_rank)
    steps = {outcome[0] for outcome in outcomes}
    assert len(steps) == 1
    step = steps.pop()
    assert step >= 5
    for _, said, names in outcomes:
        assert f"[rank {bad_rank}] step 2 was not saved" in said
        assert "No space left on device" in said
        assert names == ["step-1", f"step-{step + 1}"]


def test_without_a_check_the_next_save_tells(tmp_path: Path) -> None:
    """Whoever never asks hears it from the next save, which saves nothing; the one after that does."""

    def body() -> list[str]:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            gate = threading.Event()
            gate.set()
            if ctx.rank == 1:
                saving.DISK = FullDisk(gate)
            checkpoint.save(tmp_path, {"x": torch.ones(4)}, step=1, background=True)
            saving.DISK = REAL_DISK
            with pytest.raises(CheckpointError, match="step 1 was not saved"):
                checkpoint.save(tmp_path, {"x": torch.ones(4)}, step=2)
            return [checkpoint.save(tmp_path, {"x": torch.ones(4)}, step=3).wait().name]

    assert run_ranks(body, 2) == [["step-3"]] * 2


def test_one_process_hears_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other ranks check() raises as soon as the save has failed, once."""
    gate = threading.Event()
    gate.set()
    monkeypatch.setattr(saving, "DISK", FullDisk(gate))
    started = checkpoint.save(tmp_path, {"x": torch.ones(4)}, step=1, background=True)
    started._done.wait(20)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.check()
    checkpoint.check()
    assert not list(tmp_path.glob("step-*"))


def test_should_stop_tells_it_too(tmp_path: Path) -> None:
    """A loop that asks should_stop() once a step needs no other call: it raises there, on all ranks at one step."""

    def body() -> tuple[int, str]:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            gate = threading.Event()
            gate.set()
            if ctx.rank == 1:
                saving.DISK = FullDisk(gate)
            checkpoint.save(tmp_path, {"x": torch.ones(4)}, step=1, background=True)
            step = 0
            try:
                for step in range(100_000):  # noqa: B007 - told below
                    rankwise.all_reduce(torch.ones(1))
                    ctx.should_stop()
            except CheckpointError as error:
                return step, error.message[:20]
        return -1, ""

    first, second = run_ranks(body, 2)
    assert first == second == (first[0], "step 1 was not saved")


def test_leaving_waits_for_a_save_and_tells_its_end(tmp_path: Path) -> None:
    """Behind the block of init() the last save is whole; one that failed raises there, when the rank has left."""

    def body() -> list[Any]:
        with rankwise.init(device="cpu", timeout_s=30) as ctx:
            checkpoint.save(tmp_path, {"x": torch.ones(1000)}, step=1, background=True)
        names = [path.name for path in tmp_path.glob("step-*")]
        gate = threading.Event()
        gate.set()
        saving.DISK = FullDisk(gate)
        with (
            pytest.raises(CheckpointError, match="step 2 was not saved"),
            rankwise.init(device="cpu", timeout_s=30) as again,
        ):
            checkpoint.save(tmp_path, {"x": torch.ones(1000)}, step=2, background=True)
        return [names, ctx.is_open, again.is_open]

    assert run_ranks(body, 2) == [[["step-1"], False, False]] * 2
