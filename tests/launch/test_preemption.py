"""Preemption under the launcher: all ranks save at one step and leave with 75, the launcher too, and no restart is used."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from support import (
    TORCHRUN,
    Running,
    list_marked,
    read_report,
    run_rankwise,
    run_reported,
    start_rankwise,
    wait_until,
    write_script,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux

TRAIN = """
    import os, pathlib, signal, sys, time, torch, rankwise
    with rankwise.init() as ctx:
        ctx.listen_for_stop()
        pathlib.Path("started").open("a").write(".")
        for step in range(1_000_000):
            rankwise.all_reduce(torch.ones(1))
            if step == 3:
                pathlib.Path(f"up.{ctx.rank}").write_text(str(os.getpid()))
            BUSY
            if ctx.should_stop():
                pathlib.Path(f"saved.{ctx.rank}").write_text(f"{step} {ctx.stop_reason}")
                SAVE
                ctx.leave_for_requeue()
"""
TWO = ["--report", "report.json", "--max-restarts", "2", "--nproc-per-node", "2"]


def write_train(folder: Path, *, save: str = "pass", busy: str = "pass") -> None:
    """Write the script, with something to do in each step and after saving."""
    write_script(folder, TRAIN.replace("SAVE", save).replace("BUSY", busy))


def wait_up(folder: Path, ranks: int = 2) -> None:
    """Wait until so many ranks are amid their steps."""
    wait_until(lambda: len(list(folder.glob("up.*"))) == ranks, 30, what="ranks")


def check_saved(folder: Path, reason: str, ranks: int = 2) -> None:
    """All ranks have saved at one step, once, and for one reason."""
    told = {path.read_text() for path in folder.glob("saved.*")}
    assert len(list(folder.glob("saved.*"))) == ranks
    assert len(told) == 1
    assert reason in told.pop()
    assert (folder / "started").read_text() == "." * ranks


def find_pid(folder: Path, rank: int) -> int:
    """Return a rank's pid."""
    return int(wait_until((folder / f"up.{rank}").read_text))


def send(job: Running, to: str, folder: Path) -> None:
    """Send a notice the way that a test is about."""
    if to == "rank 1 alone":
        os.kill(find_pid(folder, 1), signal.SIGTERM)
    else:
        job.send(getattr(signal, to))


@pytest.mark.parametrize(
    ("to", "stopped_by"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", None), ("rank 1 alone", None)]
)
def test_all_save_at_one_step_and_leave_with_75(to: str, stopped_by: str | None, tmp_path: Path) -> None:
    """A notice to the launcher or to one rank: one step, exit code 75, one line, and no restart."""
    write_train(tmp_path)
    with start_rankwise([*TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        send(job, to, tmp_path)
        result = job.finish(20)
    assert result.code == 75, result.err
    check_saved(tmp_path, "SIG")
    report = read_report(tmp_path / "report.json")
    assert (report["kind"], report["exit_code"], report["stopped_by"]) == ("requeue", 75, stopped_by)
    assert (report["exits"], report["culprits"], report["casualties"]) == ({"0": 75, "1": 75}, [], [])
    after = f" after {stopped_by}" if stopped_by else ""
    ours = [line for line in result.err.splitlines() if line.startswith("rankwise:")]
    assert ours[-1] == (
        f"rankwise: stopped for a requeue{after}: start the same command again to go on (exit code 75)"
    )
    assert len(ours) == 2, result.err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_every_process_of_the_job(name: str, tmp_path: Path) -> None:
    """A scheduler signals all that it finds, launcher, store, ranks and workers of loaders: the job saves and leaves with 75."""
    write_train(tmp_path, busy="next(batches)")
    loader = "torch.utils.data.DataLoader(range(10_000_000), num_workers=2)"
    text = (tmp_path / "train.py").read_text()
    text = text.replace("ctx.listen_for_stop()", f"ctx.listen_for_stop(); batches = iter({loader})")
    (tmp_path / "train.py").write_text(text)
    with start_rankwise([*TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        for line in list_marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), getattr(signal, name))
        result = job.finish(30)
    assert result.code == 75, result.err
    check_saved(tmp_path, name)


def test_the_launchers_second_sigterm_kills_nobody(tmp_path: Path) -> None:
    """Schedulers repeat themselves: ranks that are saving are not killed for it, nor is it passed on as an order to hurry."""
    write_train(tmp_path, save="\n                while not pathlib.Path('go').exists(): time.sleep(0.01)")
    with start_rankwise([*TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        for _ in range(3):
            job.send(signal.SIGTERM)
            wait_until(lambda: len(list(tmp_path.glob("saved.*"))) == 2, 20)
        (tmp_path / "go").touch()
        assert job.finish(20).code == 75
    check_saved(tmp_path, "SIGTERM on rank ")


def test_one_that_does_not_follow_is_killed(tmp_path: Path) -> None:
    """A rank that hangs after the others have left gets --shutdown-timeout; the job is requeued all the same, and it is named."""
    write_train(tmp_path, save="time.sleep(ctx.rank * 600)")
    with start_rankwise(["--shutdown-timeout", "1", *TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        job.send(signal.SIGUSR1)
        result = job.finish(20)
    assert result.code == 75, result.err
    assert "rank 1 had not left in time and was killed" in result.err
    report = read_report(tmp_path / "report.json")
    assert report["exits"]["0"] == 75
    assert report["exits"]["1"] in {-signal.SIGKILL, -signal.SIGTERM}
    assert report["casualties"] == [{"rank": 1, "fate": "stopped by us", "detail": ""}]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_failure_while_saving_is_a_failure(name: str, tmp_path: Path) -> None:
    """Rank 1 can't save: its error is the first cause, and its exit code the launcher's, not 75."""
    write_train(tmp_path, save="ctx.rank and [][1]")
    args = ["--report", "report.json", "--nproc-per-node", "2", "train.py"]
    with start_rankwise(args, tmp_path) as job:
        wait_up(tmp_path)
        job.send(getattr(signal, name))
        result = job.finish(20)
    assert result.code == 1, result.err
    report = read_report(tmp_path / "report.json")
    assert (report["kind"], report["culprits"]) == ("failure", [1])
    assert "IndexError" in report["message"]


def test_a_failure_ends_ranks_that_listen_soon(tmp_path: Path) -> None:
    """Rank 1 raises; rank 0 takes SIGTERM for a notice, but has nobody to agree with: it does not hold up the restart."""
    write_train(
        tmp_path,
        busy="if step == 5: [][ctx.rank - 1] if ctx.rank else time.sleep(0.01); ctx.rank or "
        "[time.sleep(0.01) for _ in range(6000)]",
    )
    with start_rankwise(["--shutdown-timeout", "55", *TWO[:2], *TWO[4:], "train.py"], tmp_path) as job:
        result = job.finish(25)
    assert result.code == 1
    report = read_report(tmp_path / "report.json")
    assert (report["culprits"], report["exits"]["0"]) == ([1], -signal.SIGTERM)
    assert report["casualties"] == [{"rank": 0, "fate": "stopped by us", "detail": ""}]


def test_a_deadline_needs_no_signal(tmp_path: Path) -> None:
    """RANKWISE_DEADLINE alone stops all ranks in time."""
    write_train(tmp_path)
    env = {"RANKWISE_DEADLINE": None, "SLURM_JOB_END_TIME": None}
    script = (tmp_path / "train.py").read_text().replace("listen_for_stop()", "listen_for_stop(after_s=0.2)")
    (tmp_path / "train.py").write_text(script)
    result, report = run_reported(["--nproc-per-node", "2", "train.py"], tmp_path, env=env)
    assert (result.code, report["kind"]) == (75, "requeue"), result.err
    assert "leaving for a requeue, with exit code 75: 0.2 s are over, on rank" in result.err
    check_saved(tmp_path, "0.2 s are over")


def test_some_may_leave_with_0(tmp_path: Path) -> None:
    """One rank is through and leaves with 0, the other with 75: the job is requeued."""
    write_script(tmp_path, "import os, sys\nsys.exit(75 * int(os.environ['RANK']))")
    result, report = run_reported(["--max-restarts", "1", "--nproc-per-node", "2", "train.py"], tmp_path)
    assert (result.code, report["kind"], report["attempts"]) == (75, "requeue", 1), result.err


def test_a_launched_function_has_no_exit_code_to_leave_with(tmp_path: Path) -> None:
    """For rankwise.launch(fn) 75 is an exit code as any other: the caller hears of a failed rank."""
    write_script(
        tmp_path,
        """
        import os, rankwise
        def work(): os._exit(75)
        if __name__ == "__main__":
            try: rankwise.launch(work, nprocs=1)
            except rankwise.RankFailedError as error: print("failed:", str(error).splitlines()[0])
        """,
        "call.py",
    )
    result = run_rankwise(["call.py"], tmp_path, launcher=[sys.executable])
    assert result.out.startswith("failed: [rank 0]"), result.out + result.err


def test_under_torchrun_ranks_agree_too(tmp_path: Path) -> None:
    """Where torchrun passes SIGTERM on, its ranks save at one step."""
    write_train(tmp_path)
    job = Running([*TORCHRUN, "--nproc-per-node", "2", "train.py"], tmp_path)
    try:
        wait_up(tmp_path)
        job.send(signal.SIGTERM)
        job.finish(40)
    finally:
        job.process.kill()
        job.process.wait()
    check_saved(tmp_path, "SIGTERM on rank ")
