"""Preemption under the launcher: all ranks save at one step and leave with 75, the launcher too, and no restart is used."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

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
    without_patience,
    write_script,
)

pytestmark = pytest.mark.linux

TRAIN = """
    import os, pathlib, signal, sys, time, torch, rankwise
    with rankwise.init() as ctx:
        ctx.listen_for_stop(signals=("SIGTERM", "SIGUSR1", "SIGINT"))
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
    ("to", "stopped_by"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGUSR1", None), ("rank 1 alone", None)],
)
def test_all_save_at_one_step_and_leave_with_75(to: str, stopped_by: str | None, tmp_path: Path) -> None:
    """A notice to the launcher (Ctrl-C too, if they listen for it) or to one rank: one step, exit code 75, one line, no restart."""
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
    ours = [line for line in without_patience(result.err).splitlines() if line.startswith("rankwise:")]
    assert ours[-1] == (
        f"rankwise: stopped for a requeue{after}: start the same command again to continue (exit code 75)"
    )
    assert len(ours) == 2, result.err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_every_process_of_the_job(name: str, tmp_path: Path) -> None:
    """A scheduler signals all that it finds, launcher, store, ranks and workers of loaders: the job saves and leaves with 75."""
    write_train(tmp_path, busy="next(batches)")
    loader = "torch.utils.data.DataLoader(range(10_000_000), num_workers=2, multiprocessing_context='fork')"
    text = (tmp_path / "train.py").read_text()
    text = text.replace('pathlib.Path("started', f'batches = iter({loader}); pathlib.Path("started')
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_notice_that_is_repeated_to_the_very_end_kills_nobody(name: str, tmp_path: Path) -> None:
    """The launcher hears it again while the ranks' interpreters go down, where no handler runs any more, and all have it."""
    late = "\n                ctx.late = Late()"
    write_train(tmp_path, save=late)
    script = tmp_path / "train.py"
    late_class = """
class Late:
    # Modules are being emptied when this runs.
    def __del__(self, name="late." + os.environ["RANK"], mkdir=os.mkdir, listdir=os.listdir, sleep=time.sleep):
        mkdir(name)
        while "go" not in listdir():
            sleep(0.01)
"""
    text = script.read_text().replace("with rankwise", late_class + "with rankwise", 1)
    script.write_text(text.replace("ctx.late = ", "sys.late = "))
    number = getattr(signal, name)
    with start_rankwise([*TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        job.send(number)
        wait_until(lambda: len(list(tmp_path.glob("late.*"))) == 2, 20)
        for _ in range(3):
            for rank in range(2):
                os.kill(find_pid(tmp_path, rank), number)
            job.send(number)
            wait_until(lambda: not has_pending(job.process.pid))
        (tmp_path / "go").touch()
        result = job.finish(20)
    assert result.code == 75, result.err
    check_saved(tmp_path, f"{name} on rank ")


def has_pending(pid: int) -> bool:
    """Whether the kernel still has a signal for a process, or it is not asleep again after one."""
    status = Path(f"/proc/{pid}/status").read_text()
    return "State:\tS" not in status or int(status.partition("ShdPnd:\t")[2].split()[0], 16) != 0


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
    assert report["casualties"] == [{"rank": 1, "fate": "terminated by rankwise", "detail": ""}]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_failure_that_is_held_up_is_a_failure(name: str, tmp_path: Path) -> None:
    """Rank 1 can't save, and a thread keeps it from its end until it is killed: its error is told, and nothing is requeued."""
    hold = "threading.Thread(target=time.sleep, args=(600,)).start()"
    write_train(tmp_path, save=f"ctx.rank and [{hold}, [][1]]")
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("import os,", "import threading, os,", 1))
    args = ["--shutdown-timeout", "2", "--report", "report.json", "--nproc-per-node", "2", "train.py"]
    with start_rankwise(args, tmp_path) as job:
        wait_up(tmp_path)
        job.send(getattr(signal, name))
        result = job.finish(20)
    assert result.code == 1, result.err
    report = read_report(tmp_path / "report.json")
    assert (report["kind"], report["culprits"]) == ("failure", [1])
    assert report["message"] == "rank 1: IndexError: list index out of range"
    assert "[][1]" in report["traceback"]


def test_one_that_is_held_up_after_it_has_left_is_no_failure(tmp_path: Path) -> None:
    """Rank 1 has saved, and a thread keeps it from its end; what it printed before is no failure of it."""
    hold = "threading.Thread(target=time.sleep, args=(600,)).start()"
    told = "traceback.print_exception(None, ValueError('long over'), None)"
    write_train(tmp_path, save=f"ctx.rank and [{hold}, {told}]")
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("import os,", "import threading, traceback, os,", 1))
    with start_rankwise(["--shutdown-timeout", "2", *TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        job.send(signal.SIGTERM)
        result = job.finish(20)
    assert result.code == 75, result.err
    assert "rank 1 had not left in time and was killed" in result.err


def test_one_that_the_kernel_kills_meanwhile_is_a_failure(tmp_path: Path) -> None:
    """SIGKILL reaches rank 1 while it saves, as for lack of memory: not from us, though we had told it to stop."""
    write_train(tmp_path, save="ctx.rank and os.kill(os.getpid(), signal.SIGKILL)")
    script = tmp_path / "train.py"
    # To the launcher a rank with a handler of its own for SIGTERM is one that was told to end.
    own = "    signal.signal(signal.SIGTERM, lambda *_: None)\n"
    script.write_text(script.read_text().replace("    ctx.listen", f"{own}    ctx.listen"))
    with start_rankwise([*TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        job.send(signal.SIGTERM)
        result = job.finish(20)
    assert result.code == 137, result.err
    report = read_report(tmp_path / "report.json")
    assert (report["kind"], report["culprits"], report["exits"]) == ("failure", [1], {"0": 75, "1": -9})


@pytest.mark.parametrize(
    ("name", "save", "culprits"),
    [
        ("SIGTERM", "ctx.rank and [][1]", [1]),
        ("SIGUSR1", "ctx.rank and [][1]", [1]),
        ("SIGINT", "[][1]", [0, 1]),
    ],
)
def test_a_failure_while_saving_is_a_failure(name: str, save: str, culprits: list[int], tmp_path: Path) -> None:
    """Rank 1 (or all) can't save: its error is the first cause, and its exit code the launcher's, not 75 or 128 and the signal."""
    write_train(tmp_path, save=save)
    args = ["--report", "report.json", "--nproc-per-node", "2", "train.py"]
    with start_rankwise(args, tmp_path) as job:
        wait_up(tmp_path)
        job.send(getattr(signal, name))
        result = job.finish(20)
    assert result.code == 1, result.err
    report = read_report(tmp_path / "report.json")
    assert (report["kind"], report["culprits"]) == ("failure", culprits)
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
    assert report["casualties"] == [{"rank": 0, "fate": "terminated by rankwise", "detail": ""}]


def test_a_deadline_needs_no_signal(tmp_path: Path) -> None:
    """RANKWISE_DEADLINE alone stops all ranks in time."""
    write_train(tmp_path)
    env = {"RANKWISE_DEADLINE": None, "SLURM_JOB_END_TIME": None}
    script = (tmp_path / "train.py").read_text().replace("listen_for_stop(", "listen_for_stop(after_s=0.2, ")
    (tmp_path / "train.py").write_text(script)
    result, report = run_reported(["--nproc-per-node", "2", "train.py"], tmp_path, env=env)
    assert (result.code, report["kind"]) == (75, "requeue"), result.err
    assert "leaving for a requeue, with exit code 75: 0.2 s are over, on rank" in result.err
    check_saved(tmp_path, "0.2 s are over")


@pytest.mark.parametrize("how", ["script", "shell"])
def test_some_may_leave_with_0(how: str, tmp_path: Path) -> None:
    """One rank is through and leaves with 0, the other with 75, without any notice and perhaps below a shell: a requeue."""
    write_script(tmp_path, "import rankwise\nctx = rankwise.init()\nctx.rank and ctx.leave_for_requeue()")
    (tmp_path / "train.sh").write_text(f"#!/bin/sh\n{sys.executable} train.py\nexit $?\n")
    (tmp_path / "train.sh").chmod(0o755)
    program = ["--no-python", "./train.sh"] if how == "shell" else ["train.py"]
    result, report = run_reported(["--max-restarts", "1", "--nproc-per-node", "2", *program], tmp_path)
    assert (result.code, report["kind"], report["attempts"]) == (75, "requeue", 1), result.err


@pytest.mark.parametrize("end", ["sys.exit(75)", "os._exit(rankwise.REQUEUE)"])
def test_after_a_notice_a_script_may_leave_by_itself(end: str, tmp_path: Path) -> None:
    """When should_stop() has told it to stop, exit code 75 needs no further word."""
    write_train(tmp_path, save=end)
    with start_rankwise([*TWO, "train.py"], tmp_path) as job:
        wait_up(tmp_path)
        job.send(signal.SIGTERM)
        assert job.finish(20).code == 75


@pytest.mark.parametrize("listens", ["", "; ctx = rankwise.init(); ctx.listen_for_stop(); ctx.should_stop()"])
def test_75_of_a_script_that_means_something_else(listens: str, tmp_path: Path) -> None:
    """A rank that was not told to stop, and does not leave for a requeue, has failed with 75 as with any other number; the launcher's own code asks no scheduler for another start."""
    write_script(tmp_path, f"import os, rankwise{listens}\nos._exit(75)")
    result, report = run_reported(["--max-restarts", "1", "train.py"], tmp_path)
    assert (result.code, report["kind"], report["attempts"]) == (1, "failure", 2), result.err
    assert "not announced as a requeue" in str(report["reason"])


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


def test_the_launcher_itself_is_deaf_when_it_has_done(tmp_path: Path) -> None:
    """The notice comes once more when the launcher has told the verdict, and is about to exit with 75: it does."""
    write_script(tmp_path, "import rankwise\nrankwise.init().leave_for_requeue()")
    write_script(
        tmp_path,
        """
        import os, signal, sys
        from rankwise.cli.main import main
        code = main(["run", "train.py"])
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        sys.exit(code)
        """,
        "call.py",
    )
    result = run_rankwise(["call.py"], tmp_path, launcher=[sys.executable])
    assert result.code == 75, result.err


def test_the_documents_script_may_be_stopped_at_its_last_step(tmp_path: Path) -> None:
    """All is done and saved when the notice comes: the requeued run has no step left, and ends as if it had made them."""
    document = Path(__file__).parents[2] / "docs" / "howto" / "preemption.md"
    script = document.read_text().partition("```python\n")[2].partition("```")[0]
    slow = "time.sleep(0.03)"
    assert slow in script
    stop = "(step == 96) and (__import__('os').kill(__import__('os').getpid(), 15), time.sleep(1.5))"
    (tmp_path / "train.py").write_text(script.replace(slow, stop))
    args = ["--nproc-per-node", "2", "train.py", "parts"]
    first, second = (run_rankwise(args, tmp_path) for _ in range(2))
    assert first.code == 75, first.err
    assert second.code == 0, second.err
    assert second.out.splitlines()[0] == "begin at step 96"
    assert second.out.splitlines()[1].startswith("through after step 96, loss ")
