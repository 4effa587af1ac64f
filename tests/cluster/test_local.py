"""Jobs on this machine: followed, resumed, cancelled, and gone with whoever started them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import rankwise
from clocks import FakeClock
from cluster.commands import RANKWISE, call, list_jobs, make_job_env
from rankwise.base.errors import UsageError
from rankwise.cluster import job_process
from rankwise.cluster.job_process import Log, decide_outcome
from rankwise.cluster.node_process import ALIVE, KILL, NOTICE
from rankwise.cluster.ray_node import NodeLauncher
from support import leftovers, list_marked, wait_until, without_gloo, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.linux]

#: Leaves for a requeue until there are as many files as starts are wanted, and says what it is told.
SCRIPT = """
    import os, pathlib, sys
    import rankwise
    rank = os.environ["RANK"]
    print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ.get("COLOUR"), os.environ["RANKWISE_CHECKPOINT"])
    if sys.argv[1:] == ["fails"] and rank == "1":
        raise ValueError("no such colour")
    starts = len(list(pathlib.Path.cwd().glob("start-*")))
    with rankwise.init() as ctx:
        ctx.listen_for_stop()
        rankwise.barrier()
        if ctx.rank == 0:
            pathlib.Path(f"start-{starts}").touch()
        if starts < int(os.environ.get("STARTS", "1")) - 1:
            ctx.leave_for_requeue()
"""
SLEEPER = """
    import time
    print("sleeps", flush=True)
    time.sleep(300)
"""
JOB = """
    on = "local"
    ranks_per_node = 2
    checkpoint = "kept"
    command = ["train.py"]
    [env]
    COLOUR = "blue"
"""
OUTCOMES = [
    ([("a", 0), ("b", 0)], 2, (0, "")),
    ([("a", 75), ("b", 1)], 2, (75, "")),
    ([("b", 1), ("a", 137)], 2, (1, "exit code 1 on b")),
    ([("a", 3)], 1, (3, "exit code 3")),
    ([("b", 255), ("a", 1)], 2, (1, "exit code 1 on a")),
    ([("b", 255), ("a", 75)], 2, (75, "the connection to b was lost")),
    ([("b", 75), ("a", 0), ("c", 0)], 2, (0, "without b")),
    ([("b", 255), ("a", 0)], 1, (0, "without b")),
    ([("b", 137), ("a", 0)], 1, (0, "without b")),
    ([("b", 255), ("a", 255)], 1, (1, "the connection to b, a was lost")),
]


@pytest.mark.parametrize(("ends", "min_nodes", "outcome"), OUTCOMES)
def test_the_nodes_ends_make_the_jobs(ends: list[tuple[str, int]], min_nodes: int, outcome: tuple[int, str]) -> None:  # fmt: skip
    """Exit code 75 of any node counts; then whether enough nodes were through; then the first failure, but for a lost connection, which may be the consequence."""
    assert decide_outcome(ends, min_nodes) == outcome


class _SilentNode:
    """Answers nothing, and is lost once it is given up."""

    name = "a"

    def __init__(self) -> None:
        self.words, self.end = list[bytes](), None

    def find_end(self) -> tuple[None] | None:
        return self.end

    def tell(self, words: bytes) -> None:
        self.words.append(words)

    def kill(self) -> None:
        self.end = (None,)


class _FailedNode(_SilentNode):
    name = "b"

    def find_end(self) -> tuple[int]:
        return (1,)


def test_a_node_that_answers_nothing_is_given_up_and_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """It has its notice, its grace and its order to end; then it is killed by us, which is no reason to start a job again that has failed."""
    clock = FakeClock()
    monkeypatch.setattr(job_process, "SYSTEM_CLOCK", clock)
    silent, begin_s = _SilentNode(), clock.monotonic()
    log = SimpleNamespace(cause="")
    start = job_process.Start([_FailedNode(), silent], log, min_nodes=2, grace_s=30, time_s=0)
    assert start.run(lambda: (False, False)) == (1, "exit code 1 on b")
    assert [words for words in silent.words if words != ALIVE] == [NOTICE, KILL]
    assert 40 + 30 + 10 < clock.monotonic() - begin_s < 40 + 30 + 10 + 10 + 5


def test_what_a_node_is_told_before_its_launcher_is_there_is_told_with_its_start() -> None:
    """A notice that comes in the first moment of a node on Ray stops the launcher in time; the guard reads its environment first."""
    node = NodeLauncher()
    node.tell(ALIVE)
    node.tell(NOTICE)
    words = [sys.executable, "-c", "import os, time; print(os.environ['COLOUR'], flush=True); time.sleep(60)"]
    assert list(node.run(words, {"COLOUR": "blue"}, "", 30))[-1] == 128 + signal.SIGTERM


def test_the_cause_is_that_of_the_node_where_it_was(tmp_path: Path) -> None:
    """Whichever node's report comes first: one that names a cause elsewhere is none. Lines of ranks are not taken for a report's."""
    log = Log((tmp_path / "log").open("ab", buffering=0), names_nodes=True)
    log.write(b"[a rank 0]:   first    in the list\n", "a")
    log.write(b"  first    rank 1 lost a peer; the first cause is on another node: RuntimeError\n", "b")
    log.write(b"  first    rank 3: ValueError: no such colour\n", "a")
    log.write(b"  first    rank 0 lost a peer\n", "c")
    log.close()
    assert log.cause == "rank 3: ValueError: no such colour"
    assert (tmp_path / "log").read_text().splitlines()[:2] == [
        "[a rank 0]:   first    in the list",
        "[b]:   first    rank 1 lost a peer; the first cause is on another node: RuntimeError",
    ]


def test_a_job_is_started_again_after_exit_code_75(tmp_path: Path) -> None:
    """By job.toml alone; the log has both starts, `logs --rank` one rank, `jobs` the outcome, and `--forget` removes the record."""
    write_script(tmp_path, SCRIPT)
    write_script(tmp_path, JOB, "job.toml")
    done = call(tmp_path, "submit", "--requeue", "2", "--env", "STARTS=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rankwise: exit code 75: start 2 of the job" in done.stdout
    (job,) = list_jobs(tmp_path)
    assert (job["phase"], job["exit_code"], job["starts"], job["on"]) == ("succeeded", 0, 2, "local")
    lines = without_gloo(call(tmp_path, "logs", job["id"], "--rank", "1").stdout).splitlines()
    # What Gloo of older torch writes is left out, and not the name of the rank before it.
    assert [line.rpartition("]: ")[2] for line in lines if "of" in line] == ["rank 1 of 2 blue kept"] * 2
    assert call(tmp_path, "jobs", "--forget").stdout == "1 job forgotten\n"
    assert list_jobs(tmp_path) == []


def test_a_failure_is_reported_where_the_user_sits(tmp_path: Path) -> None:
    """The rank's traceback and the launcher's report are in the log, and the exit code is the launcher's; several nodes here are several launchers."""
    write_script(tmp_path, SCRIPT)
    write_script(tmp_path, JOB, "job.toml")
    done = call(tmp_path, "submit", "--nodes", "2", "--ranks-per-node", "1", "--", "train.py", "fails")
    assert done.returncode == 1
    assert "ValueError: no such colour" in done.stdout
    assert "first    rank 1: ValueError: no such colour" in done.stdout
    assert re.search(r"has failed: exit code 1 on node\d: rank 1: ValueError: no such colour", done.stderr)


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    """Submit a script that sleeps, and wait until it does."""
    write_script(folder, SLEEPER)
    client = subprocess.Popen([*RANKWISE, "submit", "--on", "local", *args, "--", "--cold", "train.py"], cwd=folder, env=make_job_env(folder),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    wait_until(lambda: any("sleeps" in one.read_text() for one in folder.glob("state/rankwise/jobs/*/log")), 60)
    return client


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that stays with its job."""
    client = start(tmp_path)
    yield client
    client.kill()
    client.communicate()


def test_nothing_outlives_the_command_that_stays(attached: subprocess.Popen[str], tmp_path: Path) -> None:
    """SIGKILL to the command ends job process, launcher and ranks; the record says why."""
    attached.kill()
    attached.wait()
    assert leftovers(wait_s=30) == []
    (job,) = list_jobs(tmp_path)
    assert (job["phase"], job["reason"]) == ("cancelled", "the command that started it has ended")


def test_ctrl_c_ends_all(attached: subprocess.Popen[str], tmp_path: Path) -> None:
    """One Ctrl-C, and the command waits for the end of all ranks."""
    attached.send_signal(signal.SIGINT)
    out, _ = attached.communicate(timeout=60)
    assert list_marked() == []
    assert "is told to stop" in out
    assert "is cancelled: cancelled" in out
    assert attached.returncode == 143


def test_a_job_whose_process_is_killed_has_failed(tmp_path: Path) -> None:
    """A detached job goes on without its command; once its job process is killed no rank is left, and the state says so."""
    client = start(tmp_path, "--detach", "--name", "sleeper")
    assert client.wait(20) == 0
    assert list_jobs(tmp_path, "sleeper")[0]["phase"] == "running"
    holder = next(int(line.split()[0]) for line in list_marked() if "cluster.job_process" in line)
    os.kill(holder, signal.SIGKILL)
    assert leftovers(wait_s=30) == []
    assert list_jobs(tmp_path)[0]["reason"] == "the process that held it was killed, and the ranks with it"
    client.communicate()


def test_a_program_submits_as_the_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle waits, tells the state, gives the lines, and cancels; the job stops at its time limit."""
    for name, value in make_job_env(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path, SLEEPER)
    handle = rankwise.submit("--cold train.py", on="local", name="sleeper", time="6s")
    assert next(line for line in handle.logs(rank=0, follow=True)).endswith("]: sleeps")
    assert handle.state().phase == "running"
    with pytest.raises(rankwise.LaunchError, match=r"job sleeper-\w+ is not over after 0 s"):
        handle.wait(timeout_s=0)
    state = handle.wait(60)
    assert (state.phase, state.exit_code, state.reason) == ("failed", 143, "time limit of 6 s")
    handle.cancel()
    with pytest.raises(UsageError, match=r"absent.py is not in .* on this machine"):
        rankwise.submit("absent.py", on="local")
    with pytest.raises(UsageError, match=r"this machine has 0 GPUs, and the job asks for 3; this machine has \d+ GiB of memory, and the job asks for 999424"):  # fmt: skip
        rankwise.submit("train.py", on="local", gpus_per_node=3, memory="976T")
    assert len(list((tmp_path / "state" / "rankwise" / "jobs").iterdir())) == 1  # nothing of those that were refused


def test_the_launchers_flags_are_read_before_the_job_is_submitted(tmp_path: Path) -> None:
    """A slip behind -- is the launcher's own error, here; what the job says is not said there once more."""
    said = {"--max-restartz=1": "--max-restartz=1\n  -> did you mean --max-restarts?", "--nproc-per-node=2": "how many ranks they have, is up to the job"}  # fmt: skip
    for flag, text in said.items():
        done = call(tmp_path, "submit", "--on", "local", "--", "--max-restarts", "3", flag, "x.py")
        assert done.returncode == 2
        assert text in done.stderr


def test_a_wrong_flag_is_named(tmp_path: Path) -> None:
    """A slip is corrected; a flag of the script's that stands before -- is told where it belongs."""
    said = {"--nods=2": "did you mean --nodes?", "--nnodes=2": "did you mean --nodes?", "--learning-rate=1": "flags of the script, and"}  # fmt: skip
    for flag, text in said.items():
        done = call(tmp_path, "submit", "--on", "ssh", flag, "--", "x.py")
        assert done.returncode == 2
        assert f"unrecognized arguments: {flag}\n  -> {text}" in done.stderr
