"""Signals to the launcher: those that end a job end all of it, in time; others pass through; nohup holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from support import (
    RANKWISE,
    Running,
    Terminal,
    leftovers,
    list_marked,
    make_env,
    run_rankwise,
    start_rankwise,
    wait_until,
    write_script,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.linux, pytest.mark.checked]

WAIT = """
    import os, pathlib, signal, time
    rank = os.environ["RANK"]
    def save(number, frame):
        pathlib.Path(f"saved.{rank}").write_text(str(number)); os._exit(0)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"): signal.signal(getattr(signal, name), save)
    pathlib.Path(f"up.{rank}").touch()
    while True: time.sleep(60)
"""
DEAF = """
    import os, pathlib, signal, time
    for name in ("SIGTERM", "SIGINT", "SIGHUP"): signal.signal(getattr(signal, name), signal.SIG_IGN)
    pathlib.Path("up." + os.environ["RANK"]).touch()
    while True: time.sleep(60)
"""
TWO = ["--report", "report.json", "--nproc-per-node", "2", "train.py"]


def wait_up(folder: Path, ranks: int = 2) -> None:
    """Wait until so many ranks have said that they run."""
    wait_until(lambda: len(list(folder.glob("up.*"))) == ranks, what="ranks")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_reaches_the_ranks_and_ends_the_job(name: str, tmp_path: Path) -> None:
    """The ranks get the signal that the launcher got, may save, and the exit code is 128 + N, with a report."""
    number = int(getattr(signal, name))
    write_script(tmp_path, WAIT)
    with start_rankwise(TWO, tmp_path) as job:
        wait_up(tmp_path)
        job.send(number)
        result = job.finish(10)
    assert result.code == 128 + number
    assert [path.read_text() for path in sorted(tmp_path.glob("saved.*"))] == [str(number)] * 2
    assert name in result.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["kind"], report["culprits"]) == ("failure", [])
    assert name in report["message"]


def test_a_signal_ends_the_whole_family(tmp_path: Path) -> None:
    """SIGTERM to the launcher ends also what ranks started in sessions of their own."""
    write_script(tmp_path, "import subprocess, pathlib, time\nsubprocess.Popen(['sleep', '61'], start_new_session=True)\npathlib.Path('up.0').touch()\ntime.sleep(60)")  # fmt: skip
    with start_rankwise(["train.py"], tmp_path) as job:
        wait_up(tmp_path, 1)
        job.send(signal.SIGTERM)
        assert job.finish(10).code == 143
    assert leftovers(wait_s=0.5) == []


@pytest.mark.parametrize("how", ["nohup", "ignored"])
def test_nohup_is_honoured(how: str, tmp_path: Path) -> None:
    """A launcher started under nohup outlives SIGHUP, and so do its ranks (torchrun's don't)."""
    write_script(
        tmp_path,
        "import pathlib, time\npathlib.Path('up.0').touch()\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)",
    )
    command = ["nohup", *RANKWISE, "train.py"] if how == "nohup" else [*RANKWISE, "train.py"]
    running = Running(command, tmp_path, preexec_fn=None if how == "nohup" else lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN) and None)  # fmt: skip
    wait_up(tmp_path, 1)
    for line in list_marked():
        if "store_process" not in line:
            os.kill(int(line.split()[0]), signal.SIGHUP)
    running.send(signal.SIGHUP)
    time.sleep(0.3)
    assert running.process.poll() is None
    (tmp_path / "go").touch()
    assert running.finish(10).code == 0


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_user_signals_reach_the_ranks_and_end_nothing(name: str, tmp_path: Path) -> None:
    """SIGUSR1 and SIGUSR2 (a scheduler's "save now") reach every rank; the job goes on to its end."""
    write_script(
        tmp_path,
        f"""
        import os, pathlib, signal, time
        rank, got = os.environ["RANK"], []
        signal.signal(signal.{name}, lambda *_: (got.append(1), pathlib.Path(f"got.{{rank}}").touch()))
        pathlib.Path(f"up.{{rank}}").touch()
        while not pathlib.Path("go").exists(): time.sleep(0.01)
        assert got == [1]
        """,
    )
    with start_rankwise(TWO, tmp_path) as job:
        wait_up(tmp_path)
        job.send(getattr(signal, name))
        wait_until(lambda: len(list(tmp_path.glob("got.*"))) == 2)
        (tmp_path / "go").touch()
        assert job.finish(10).code == 0


def test_other_signals_to_handle(tmp_path: Path) -> None:
    """--signals-to-handle SIGUSR1: that one ends the job then, as under torchrun."""
    write_script(tmp_path, "import pathlib, signal, time\npathlib.Path('up.0').touch()\ntime.sleep(60)")
    with start_rankwise(["--signals-to-handle", "SIGUSR1,SIGTERM", "train.py"], tmp_path) as job:
        wait_up(tmp_path, 1)
        job.send(signal.SIGUSR1)
        assert job.finish(10).code == 128 + signal.SIGUSR1


def test_ctrl_c_twice_is_prompt(tmp_path: Path) -> None:
    """On a terminal a second Ctrl-C ends ranks that ignore SIGINT and SIGTERM at once, whatever --shutdown-timeout."""
    write_script(tmp_path, DEAF)
    with Terminal([*RANKWISE, *TWO], tmp_path) as terminal:
        wait_up(tmp_path)
        terminal.type("\x03")
        time.sleep(0.5)
        assert terminal.process.poll() is None
        terminal.type("\x03")
        assert terminal.finish(10).code == 130  # of the 30 s that ranks have by default
        assert leftovers(wait_s=1) == []


def test_ctrl_c_twice_does_not_wait_for_deaf_grandchildren(tmp_path: Path) -> None:
    """A second Ctrl-C also cuts short the grace of what ranks have started."""
    child = "import signal, time, pathlib; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); pathlib.Path('up.0').touch(); time.sleep(60)"
    write_script(tmp_path, f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\ntime.sleep(60)")  # fmt: skip
    with start_rankwise(["train.py"], tmp_path) as job:
        wait_up(tmp_path, 1)
        job.send(signal.SIGINT)
        time.sleep(0.5)
        job.send(signal.SIGINT)
        assert job.finish(10).code == 130  # of the 30 s that ranks have by default


def test_one_ctrl_c_is_one_signal_to_a_rank(tmp_path: Path) -> None:
    """A single Ctrl-C on a terminal reaches each rank once: a handler that counts sees 1."""
    write_script(
        tmp_path,
        """
        import os, pathlib, signal, time
        got = []
        signal.signal(signal.SIGINT, lambda *_: got.append(1))
        pathlib.Path("up." + os.environ["RANK"]).touch()
        while not got: time.sleep(0.02)
        time.sleep(0.3)
        pathlib.Path("count." + os.environ["RANK"]).write_text(str(len(got)))
        """,
    )
    with Terminal([*RANKWISE, *TWO], tmp_path) as terminal:
        wait_up(tmp_path)
        terminal.type("\x03")
        assert terminal.finish(10).code == 130
    assert [path.read_text() for path in sorted(tmp_path.glob("count.*"))] == ["1", "1"]


def test_ctrl_c_of_a_plain_script(tmp_path: Path) -> None:
    """A script without handlers: Ctrl-C ends it with one short report, not a traceback for each rank in our name."""
    write_script(tmp_path, "import os, pathlib, time\npathlib.Path('up.' + os.environ['RANK']).touch()\ntime.sleep(60)")
    with Terminal([*RANKWISE, *TWO], tmp_path) as terminal:
        wait_up(tmp_path)
        time.sleep(0.1)
        terminal.type("\x03")
        result = terminal.finish(10)
    assert result.code == 130
    assert "received SIGINT" in result.out
    assert "Traceback" not in result.out


def test_the_shutdown_timeout_is_honoured(tmp_path: Path) -> None:
    """Ranks that ignore the signal have --shutdown-timeout seconds, then SIGKILL."""
    write_script(tmp_path, DEAF)
    with start_rankwise(["--shutdown-timeout", "1", *TWO], tmp_path) as job:
        wait_up(tmp_path)
        start = time.monotonic()
        job.send(signal.SIGTERM)
        assert job.finish(10).code == 143
        assert time.monotonic() - start > 0.9
    assert json.loads((tmp_path / "report.json").read_text())["exits"] == {"0": -9, "1": -9}


def test_time_to_save_is_given(tmp_path: Path) -> None:
    """A rank that takes two seconds to save after SIGTERM is not killed in the middle."""
    script = "import pathlib, signal, sys, time\ndef save(*_):\n    time.sleep(2); pathlib.Path('saved').touch(); sys.exit(0)\n"
    write_script(tmp_path, script + "signal.signal(signal.SIGTERM, save)\npathlib.Path('up.0').touch()\ntime.sleep(60)")
    with start_rankwise(["train.py"], tmp_path) as job:
        wait_up(tmp_path, 1)
        job.send(signal.SIGTERM)
        assert job.finish(10).code == 143
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("end", ["signal", "failure"])
def test_a_stopped_rank_is_ended(end: str, tmp_path: Path) -> None:
    """A rank under SIGSTOP can't hear SIGTERM: it is continued and ended all the same, soon."""
    write_script(
        tmp_path,
        """
        import os, pathlib, signal, time
        pathlib.Path("up." + os.environ["RANK"]).write_text(str(os.getpid()))
        while not pathlib.Path("go").exists() or os.environ["RANK"] == "0": time.sleep(0.01)
        raise ValueError("go")
        """,
    )
    with start_rankwise(TWO, tmp_path) as job:
        wait_up(tmp_path)
        os.kill(int(wait_until((tmp_path / "up.0").read_text)), signal.SIGSTOP)
        if end == "signal":
            job.send(signal.SIGTERM)
        else:
            (tmp_path / "go").touch()
        assert job.finish(10).code == (143 if end == "signal" else 1)  # of the 30 s that ranks have by default


def test_a_lost_terminal_ends_the_job(tmp_path: Path) -> None:
    """When the terminal goes (window closed, ssh lost) nothing is left, and the report is written."""
    write_script(tmp_path, WAIT)
    code = "import os, pty, subprocess, sys, time\npid, fd = pty.fork()\nif pid == 0: os.execv(sys.argv[1], sys.argv[1:])\n" \
        "while len([n for n in os.listdir() if n.startswith('up.')]) < 2: time.sleep(0.01)\nos.close(fd)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *RANKWISE, *TWO], cwd=tmp_path, env=make_env(), capture_output=True, text=True, timeout=30, check=True)  # fmt: skip
    assert done.stdout.strip() == "129"
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "failure"
    assert leftovers(wait_s=1) == []


@pytest.mark.leaves_processes
def test_after_success_what_the_script_left_goes_on(tmp_path: Path) -> None:
    """An uploader that the script left running outlives the job, and does not die of SIGPIPE when it speaks."""
    child = "import sys, time, pathlib\nwhile not pathlib.Path('over').exists(): time.sleep(0.01)\nfor n in range(15):\n    sys.stderr.write(f'uploading {n}\\n'); sys.stderr.flush()\npathlib.Path('uploaded').touch()"
    write_script(
        tmp_path,
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)",
    )
    with start_rankwise(["--nproc-per-node", "1", "train.py"], tmp_path) as job:
        assert job.process.wait(20) == 0, "the launcher waited for the uploader"
        (tmp_path / "over").touch()
        wait_until((tmp_path / "uploaded").exists, 10)
        wait_until(lambda: "uploading 14" in job.err, 5)


@pytest.mark.leaves_processes
def test_after_failure_nothing_goes_on(tmp_path: Path) -> None:
    """After a failed job the same uploader is ended."""
    write_script(
        tmp_path,
        "import subprocess, sys\nsubprocess.Popen(['sleep', '62'], start_new_session=True)\nsys.exit(3)",
    )
    assert run_rankwise(["train.py"], tmp_path).code == 3
    assert leftovers(wait_s=0.5) == []


@pytest.mark.leaves_processes
def test_a_reader_of_standard_output_is_not_kept_waiting(tmp_path: Path) -> None:
    """`out=$(rankwise run …)` returns with the job although a process left behind still holds standard error."""
    write_script(tmp_path, "import subprocess, sys\nsubprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)\nprint('done')")  # fmt: skip
    done = subprocess.run([*RANKWISE, "train.py"], cwd=tmp_path, env=make_env(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=True)  # fmt: skip
    assert done.stdout == b"done\n"


def test_a_signal_before_the_ranks_run(tmp_path: Path) -> None:
    """SIGTERM while the launcher still starts ends it with 143, and nothing is left."""
    write_script(tmp_path, "import time; time.sleep(60)")
    for delay_s in (0.06, 0.1, 0.15, 0.2):
        with start_rankwise(TWO, tmp_path) as job:
            time.sleep(delay_s)
            job.send(signal.SIGTERM)
            assert job.finish(10).code in {143, -15}
        assert leftovers(wait_s=1) == []
