"""Restarts: what a failed attempt left is gone before the next one starts, and every attempt meets anew."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

import pytest

from support import list_marked, run_rankwise, run_reported, start_rankwise, wait_until, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux


def test_attempts_are_numbered_and_meet_on_fresh_ports(tmp_path: Path) -> None:
    """TORCHELASTIC_RESTART_COUNT counts up, MASTER_PORT is another each time, and the last attempt's end is the job's."""
    write_script(
        tmp_path,
        """
        import os, sys
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        sys.stdout.write(f"{os.environ['RANK']} {count} {os.environ['TORCHELASTIC_MAX_RESTARTS']} {os.environ['MASTER_PORT']}\\n")
        if count < 2 and os.environ["RANK"] == "1": raise ValueError(f"attempt {'abc'[count]}")
        if count < 2: import time; time.sleep(30)
        """,
    )
    result, report = run_reported(["--nproc-per-node", "2", "--max-restarts", "3", "train.py"], tmp_path)
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.splitlines()]
    by_attempt = {count: {line[3] for line in lines if line[1] == count} for count in ("0", "1", "2")}
    assert all(len(ports) == 1 for ports in by_attempt.values()), lines
    assert len(set.union(*by_attempt.values())) == 3, lines
    assert {line[2] for line in lines} == {"3"}
    assert report["kind"] == "ok"
    assert report["attempts"] == 3
    assert "restart 1 of 3" in result.err
    assert "restart 2 of 3" in result.err


def test_a_group_meets_again_after_a_kill(tmp_path: Path) -> None:
    """A rank killed with -9 after a completed all_reduce: the next attempt meets and reduces (torch's own often can't)."""
    write_script(
        tmp_path,
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1); dist.all_reduce(total)
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if count < 2 and dist.get_rank() == count: os.kill(os.getpid(), 9)
        dist.all_reduce(total)
        if dist.get_rank() == 0: sys.stdout.write(f"{count} {int(total)}\\n")
        dist.destroy_process_group()
        """,
    )
    result = run_rankwise(["--nproc-per-node", "2", "--max-restarts", "2", "train.py"], tmp_path)
    assert (result.code, result.out) == (0, "2 4\n"), result.err
    assert "first    rank 0" in result.err
    assert "first    rank 1" in result.err


def test_used_up_restarts_say_so(tmp_path: Path) -> None:
    """When all restarts are used up the exit code is the last attempt's first cause, and the report says how many."""
    write_script(
        tmp_path,
        "import os, sys\nn = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(f'{n} at ' + 'abcdef'[n])",
    )
    result, report = run_reported(["--max-restarts", "1", "train.py"], tmp_path)
    assert result.code == 1
    assert report["attempts"] == 2
    assert "the only restart is used up" in result.err


def test_a_crash_loop_stops_early(tmp_path: Path) -> None:
    """The same error at the same line three times, none getting further: no more restarts, and the reason is told."""
    write_script(tmp_path, "import os\nprint('try', flush=True)\nraise ValueError(f'bad value {os.getpid()}')")
    result, report = run_reported(["--max-restarts", "50", "train.py"], tmp_path)
    assert result.code == 1
    assert result.out.count("try") == 3
    assert "48 more restarts would not help" in result.err or "more restarts would not help" in result.err
    assert report["attempts"] == 3
    assert "same cause at the same place" in report["end"]


def test_kills_from_outside_are_no_crash_loop(tmp_path: Path) -> None:
    """A rank that is killed from outside again and again (no place of its own) uses all its restarts."""
    write_script(
        tmp_path,
        "import os\nprint('try', flush=True)\nif os.environ['TORCHELASTIC_RESTART_COUNT'] != '5': os.kill(os.getpid(), 9)",
    )
    result = run_rankwise(["--max-restarts", "5", "train.py"], tmp_path)
    assert result.code == 0
    assert result.out.count("try") == 6


MEMBER = """
    import os, pathlib, signal, sys, time
    name = sys.argv[1]
    def save(*_):
        pathlib.Path(name + ".saved").touch(); os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if name == "deaf" else save)
    if name == "daemon":
        if os.fork(): os._exit(0)
        os.setsid()
        if os.fork(): os._exit(0)
    pathlib.Path(name + ".up").write_text(str(os.getpid()))
    if name == "stopped": os.kill(os.getpid(), signal.SIGSTOP)
    while True: time.sleep(60)
"""
FAMILY = """
    import os, subprocess, sys, time, pathlib
    names = os.environ["NAMES"].split()
    ups = [pathlib.Path(name + ".up") for name in names]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        for name in names: subprocess.Popen([sys.executable, "member.py", name], start_new_session=True)
        end = time.monotonic() + 10
        while not all(up.exists() and up.read_text() for up in ups) and time.monotonic() < end: time.sleep(0.01)
        time.sleep(0.1)
        raise RuntimeError("with a family")
    print("left", [up.stem for up in ups if os.path.exists("/proc/" + up.read_text())])
"""


def test_a_failed_attempts_family_may_save_and_is_gone_before_the_next(tmp_path: Path) -> None:
    """Grandchildren of a failed attempt (own session, daemon, stopped) get SIGTERM, may save, and are gone then."""
    write_script(tmp_path, FAMILY)
    write_script(tmp_path, MEMBER, "member.py")
    result = run_rankwise(["--max-restarts", "1", "train.py"], tmp_path, env={"NAMES": "session daemon stopped"})
    assert (result.code, result.out) == (0, "left []\n"), result.err
    assert {path.name for path in tmp_path.glob("*.saved")} == {
        "session.saved",
        "daemon.saved",
        "stopped.saved",
    }
    assert result.wall_s < 5


def test_deaf_grandchildren_are_killed_after_their_grace(tmp_path: Path) -> None:
    """One that ignores SIGTERM has 5 s, no more."""
    write_script(tmp_path, FAMILY)
    write_script(tmp_path, MEMBER, "member.py")
    result = run_rankwise(["--max-restarts", "1", "train.py"], tmp_path, env={"NAMES": "deaf"})
    assert (result.code, result.out) == (0, "left []\n"), result.err
    assert 4.5 < result.wall_s < 8


def test_ranks_that_ignore_sigterm_are_killed_after_the_shutdown_timeout(tmp_path: Path) -> None:
    """Before a restart a rank that does not react to SIGTERM has --shutdown-timeout seconds, then SIGKILL."""
    write_script(
        tmp_path,
        """
        import os, signal, time, pathlib
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1": raise SystemExit(0)
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path("deaf").touch(); time.sleep(60)
        while not pathlib.Path("deaf").exists(): time.sleep(0.01)
        raise ValueError("first")
        """,
    )
    args = ["--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1", "train.py"]
    result = run_rankwise(args, tmp_path)
    assert result.code == 0
    assert 1 < result.wall_s < 5


def test_ctrl_c_during_a_restart_ends_the_job(tmp_path: Path) -> None:
    """A signal in the grace between two attempts ends the job: no further attempt is started."""
    write_script(tmp_path, FAMILY)
    write_script(tmp_path, MEMBER, "member.py")
    args = ["--max-restarts", "3", "--report", "report.json", "train.py"]
    with start_rankwise(args, tmp_path, env={"NAMES": "deaf"}) as job:
        wait_until((tmp_path / "deaf.up").exists)
        time.sleep(0.6)
        job.send(signal.SIGINT)
        result = job.finish(15)
    assert result.code == 130, result.err
    assert "left" not in result.out
    assert list_marked() == []
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "failure"


def test_logs_of_every_attempt_stay(tmp_path: Path) -> None:
    """Each attempt has its own folder of logs, as under torchrun."""
    write_script(tmp_path, "import os, sys; print('hello', os.environ['TORCHELASTIC_RESTART_COUNT']); sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")  # fmt: skip
    result = run_rankwise(["--max-restarts", "1", "--log-dir", "logs", "-r", "3", "train.py"], tmp_path)
    assert result.code == 0
    texts = {path.parts[-3]: path.read_text() for path in tmp_path.glob("logs/*/attempt_*/0/stdout.log")}
    assert texts == {"attempt_0": "hello 0\n", "attempt_1": "hello 1\n"}


def test_a_fixed_port_serves_every_attempt(tmp_path: Path) -> None:
    """With --master-port the same port is bound again for the next attempt, with ranks of the last one just gone."""
    from support import free_port

    write_script(
        tmp_path,
        """
        import os, sys, torch.distributed as dist
        dist.init_process_group("gloo"); dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os._exit(7)
        sys.stdout.write("met\\n"); dist.destroy_process_group()
        """,
    )
    args = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port()), "train.py"]
    result = run_rankwise(args, tmp_path)
    assert (result.code, result.out) == (0, "met\nmet\n"), result.err


def test_a_script_that_says_no_every_time_is_a_loop(tmp_path: Path) -> None:
    """sys.exit with the same text three times is a crash loop, though nothing raised and no line is known."""
    write_script(tmp_path, "import sys; sys.exit('the data set is not there')")
    result = run_rankwise(["--max-restarts", "9", "train.py"], tmp_path)
    assert result.code == 1
    assert result.err.count("the data set is not there\nrankwise: ") == 3
    assert "7 more restarts would not help" in result.err
