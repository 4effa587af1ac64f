"""A save in the background is of the moment of its call, tells its failure on every rank, and outlives the script's last line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise
from faulty_disks import FaultyDisk, fail
from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint import saving
from rankwise.checkpoint.disk import REAL_DISK
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class HeldDisk:
    """The real disk, once the test lets it continue."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def do(*args: Any) -> Any:
            if name != "make_folder":  # made in the foreground
                assert self.may_go_on.wait(30)
            return getattr(REAL_DISK, name)(*args)

        return do


def test_what_is_saved_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Training, plain values and generators that go on while nothing is written yet are not seen in the checkpoint."""

    def body() -> None:
        with rankwise.init(device="cpu") as ctx:
            torch.manual_seed(0)
            saving.DISK = disk = HeldDisk()  # type: ignore[assignment]
            model = rankwise.apply_ddp(nn.Linear(3, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            state = {
                "model": model,
                "optimizer": optimizer,
                "log": [1, 2],
                "own": checkpoint.PerRank([ctx.rank]),
            }
            weight = model.module.weight.detach().clone()
            momentum = optimizer.state[model.module.weight]["momentum_buffer"].clone()
            going = checkpoint.save(tmp_path, state, step=1, background=True)
            expected = torch.rand(3)
            assert not going.is_done
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.module.weight.zero_()
            state["log"].append(3)
            state["own"].value.append("more")
            disk.may_go_on.set()
            assert going.wait() == tmp_path / "step-1"
            assert checkpoint.load(tmp_path, state) == 1
            assert torch.equal(model.module.weight, weight)
            assert torch.equal(optimizer.state[model.module.weight]["momentum_buffer"], momentum)
            assert state["log"] == [1, 2]
            assert state["own"].value == [ctx.rank]
            assert torch.equal(torch.rand(3), expected)

    run_ranks(body, 2)


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    """There are never two saves at once, and the memory of the first is not written over."""

    def body() -> None:
        with rankwise.init(device="cpu"):
            saving.DISK = disk = HeldDisk()  # type: ignore[assignment]
            first = checkpoint.save(tmp_path, {"t": torch.full((100,), 1.0)}, step=1, background=True)
            was_done: list[bool] = []
            agree = saving.agree

            def look(*args: Any, **options: Any) -> Any:
                was_done.append(first.is_done)
                return agree(*args, **options)

            saving.agree = look
            threading.Timer(0.05, disk.may_go_on.set).start()
            second = checkpoint.save(tmp_path, {"t": torch.full((100,), 2.0)}, step=2, background=True)
            assert was_done == [True]
            second.wait()
            for step in (1, 2):
                state = {"t": torch.zeros(100)}
                checkpoint.load(tmp_path, state, step=step)
                assert state["t"].tolist() == [float(step)] * 100

    run_ranks(body, 2)


@pytest.mark.parametrize("how", ["save", "wait", "load", "check"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_failure_in_the_background_is_raised_on_all_ranks(tmp_path: Path, victim: int, how: str) -> None:
    """The next call raises it, once, on every rank, with file and cause; then saving goes on."""

    def body() -> str:
        with rankwise.init(device="cpu") as ctx:
            checkpoint.save(tmp_path, {"t": torch.ones(3)}, step=1)
            if ctx.rank == victim:
                saving.DISK = FaultyDisk(1, fail(errno.EIO), only=("write",))
            going = checkpoint.save(tmp_path, {"t": torch.ones(3)}, step=2, background=True)

            def check_often() -> None:
                for _ in range(1000):
                    checkpoint.check()
                    threading.Event().wait(0.01)

            calls: dict[str, Callable[[], object]] = {
                "save": lambda: checkpoint.save(tmp_path, {"t": torch.ones(3)}, step=3),
                "wait": going.wait,
                "load": lambda: checkpoint.load(tmp_path, {"t": torch.ones(3)}),
                "check": check_often,
            }
            with pytest.raises(CheckpointError) as caught:
                calls[how]()
            saving.DISK = REAL_DISK
            checkpoint.save(tmp_path, {"t": torch.ones(3)}, step=4)
            assert checkpoint.load(tmp_path, {"t": torch.ones(3)}) == 4
            if ctx.is_main:
                assert sorted(path.name for path in tmp_path.iterdir()) == [".writer", "step-1", "step-4"]
            return str(caught.value)

    told = set(run_ranks(body, 2))
    assert len(told) == 1
    text = told.pop()
    assert f"[rank {victim}] step 2 was not saved: can't write {tmp_path}" in text
    assert os.strerror(errno.EIO) in text


_LAST_SAVE = """
import sys, threading
import torch
from rankwise import checkpoint
from rankwise.checkpoint import saving

carry_out = saving.carry_out

def carry_out_late(order):
    threading.main_thread().join()  # the interpreter is going down
    return carry_out(order)

saving.carry_out = carry_out_late
if len(sys.argv) > 2:
    import rankwise
    ctx = rankwise.init(device="cpu")
checkpoint.save(sys.argv[1], {"t": torch.arange(5)}, step=1, background=True)
"""


def check_saved(folder: Path) -> None:
    state = {"t": torch.zeros(5, dtype=torch.int64)}
    assert checkpoint.load(folder, state) == 1
    assert state["t"].tolist() == [0, 1, 2, 3, 4]
    assert checkpoint.verify(folder) == []


def test_a_save_right_before_the_end_of_the_script_is_committed(tmp_path: Path) -> None:
    """The script's last line may be a save in the background: Python goes down only when it is committed."""
    command = [sys.executable, "-c", _LAST_SAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    check_saved(tmp_path)


def test_leaving_the_job_does_not_lose_the_last_save(tmp_path: Path) -> None:
    """Two ranks that save in the background and leave the job at once: the save is committed."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(
        """
        import sys
        import torch
        import rankwise
        from rankwise import checkpoint

        with rankwise.init(device="cpu") as ctx:
            checkpoint.save(sys.argv[1], {"t": torch.arange(5), "own": checkpoint.PerRank(ctx.rank)}, step=1, background=True)
        """
    ))  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "rankwise",
        "run",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / "runs"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    check_saved(tmp_path / "runs")


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    """An evaluator that was forked in the middle of a save loads what is there: the thread that writes is not in it."""

    def body() -> int:
        checkpoint.save(tmp_path, {"n": 1}, step=1)
        saving.DISK = disk = HeldDisk()  # type: ignore[assignment]
        going = checkpoint.save(tmp_path, {"n": 2}, step=2, background=True)
        pid = os.fork()
        if not pid:
            os._exit(checkpoint.load(tmp_path, {"n": 0}) or 99)
        _, status = os.waitpid(pid, 0)
        disk.may_go_on.set()
        going.wait()
        return os.waitstatus_to_exitcode(status)

    assert run_ranks(body, 1, timeout_s=20) == [1]
