"""`rankwise why`: a job that hangs right now is judged from outside, whoever has started it, and goes on unharmed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.cli.main import main
from rankwise.evidence.reader.live_ranks import find_ranks
from rankwise.evidence.reader.process_looks import ProcessLook, find_share
from rankwise.evidence.reader.process_state import ProcessFacts
from support import (
    RANKWISE,
    TORCHRUN,
    Running,
    free_port,
    kill_leftovers,
    line_of,
    make_env,
    start_rankwise,
    wait_until,
    write_script,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.linux
HAS_PYSPY = shutil.which("py-spy") is not None or Path(sys.executable).with_name("py-spy").exists()
needs_pyspy = pytest.mark.skipif(not HAS_PYSPY, reason="py-spy is not installed")
#: Each rank leaves a file when it is where it stays.
HEAD = """
import os, time, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
one = torch.ones(3)
dist.all_reduce(one)
pathlib.Path(f"there{rank}").touch()
"""
SLEEPS = """
if rank == 1:
    time.sleep(1000)
dist.all_reduce(one)  # by rank 0
"""
BUSY = """
while rank == 1:
    pass
dist.all_reduce(one)  # by rank 0
"""
APART = """
if rank == 1:
    dist.barrier()
else:
    dist.all_reduce(one)
"""
DUMP = [
    {"pid": 0, "os_thread_id": 0, "thread_id": 1, "thread_name": "MainThread", "active": False, "owns_gil": False,
     "frames": [{"name": "<module>", "filename": "/job/train.py", "line": 9}]},
]  # fmt: skip


@contextmanager
def running(command: Sequence[str], folder: Path, num_ranks: int = 2, **env: str) -> Iterator[Running]:
    """Run a job whose ranks stay; it is ended with all below it."""
    job = Running(command, folder, env=env)
    try:
        wait_until(lambda: all((folder / f"there{rank}").exists() for rank in range(num_ranks)), timeout_s=40)
        yield job
    finally:
        # torchrun's ranks are in sessions of their own.
        kill_leftovers()
        job.process.wait()
        job.close()


def torchrun(num_ranks: int = 2) -> list[str]:
    return [*TORCHRUN, "--standalone", f"--nproc-per-node={num_ranks}", "train.py"]


def ask(pid: int, capsys: pytest.CaptureFixture[str], *, until: int | None = None) -> tuple[int, dict[str, Any]]:
    """Ask why; until a rank stands where it stays, it may still be on its way."""

    def once() -> tuple[int, dict[str, Any]]:
        code = main(["why", str(pid), "--json"])
        return code, json.loads(capsys.readouterr().out)

    if until is None:
        return once()
    found: list[tuple[int, dict[str, Any]]] = []
    try:
        wait_until(lambda: found.append(once()) or found[-1][0] == until, timeout_s=60)
    except AssertionError as error:
        raise AssertionError(f"never {until}, at last {found[-1]}") from error
    return found[-1]


def test_a_process_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a PID that nobody has the host is not blamed: the job may have ended, or run elsewhere."""
    assert main(["why", "999999999"]) == 2
    told = capsys.readouterr().err
    assert "there is no process 999999999 on this host" in told
    assert "has it ended, or does the job run on another host?" in told
    assert "/proc" not in told


@needs_pyspy
def test_a_rank_that_sleeps_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of torchrun's two ranks one sleeps: told with both lines, by torchrun's PID and by a rank's, and all go on."""
    script = write_script(tmp_path, HEAD.replace("one =", "open(f'pid{rank}', 'w').write(str(os.getpid()))\none =") + SLEEPS)  # fmt: skip
    with running(torchrun(), tmp_path) as job:
        code, verdict = ask(job.process.pid, capsys, until=1)
        assert (code, verdict["kind"]) == (1, "hang")
        assert 1 in verdict["culprits"]
        assert verdict["where"] == line_of(script, "time.sleep")
        assert [(one["rank"], one["where"], one["op"]) for one in verdict["waiting"] if one["rank"] == 0] == [
            (0, line_of(script, "# by rank 0"), "all_reduce")
        ]
        rank = int((tmp_path / "pid1").read_text())
        assert main(["why", str(rank)]) == 1
        said = capsys.readouterr().out
        assert said.startswith("rankwise: the job may hang\n")
        assert "rank 1 is sleeping at train.py" in said
        assert job.process.poll() is None


@needs_pyspy
def test_a_rank_at_work_is_slow_and_a_stopped_one_is_told_and_not_woken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 computes while the other waits: exit code 0, and who is waited for; under SIGSTOP it is a hang, and still stopped afterwards."""
    write_script(tmp_path, HEAD + "open(f'pid{rank}', 'w').write(str(os.getpid()))\n" + BUSY)
    with running(torchrun(), tmp_path) as job:
        code, verdict = ask(job.process.pid, capsys, until=0)
        assert (code, verdict["kind"]) == (0, "ok")
        wait_until(lambda: "rank 1 is busy" in ask(job.process.pid, capsys)[1]["message"], timeout_s=60)
        pid = int(wait_until(lambda: (tmp_path / "pid1").exists() and (tmp_path / "pid1").read_text()))
        os.kill(pid, signal.SIGSTOP)
        _, verdict = ask(job.process.pid, capsys, until=1)
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    assert verdict["culprits"] == [1]
    assert "stopped" in verdict["message"]


def test_a_rank_that_gets_no_core_is_no_idle_one() -> None:
    """On a busy host a rank that computes uses little of a core, and waits for one all the time; one that sleeps again and again waits for one each time it wakes."""
    process = ProcessFacts(state="running", ticks=0)

    def find_share_of(waited_s: float, num_rests: int) -> float | None:
        looks = [
            ProcessLook(process=process, core_wait=core_wait, at_s=at_s)
            for at_s, core_wait in ((0.0, (3.0, 7)), (2.0, (3.0 + waited_s, 7 + num_rests)))
        ]
        return find_share(*looks)

    assert [find_share_of(1.9, 11), find_share_of(1.9, 40), find_share_of(0.0, 0)] == [pytest.approx(0.95), 0.0, 0.0]


@needs_pyspy
def test_ranks_in_different_collectives_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks wait, at two lines: told, without a culprit."""
    write_script(tmp_path, HEAD + APART)
    with running(torchrun(), tmp_path) as job:
        _, verdict = ask(job.process.pid, capsys, until=1)
    assert (verdict["kind"], verdict["culprits"]) == ("hang", [])
    assert verdict["message"].startswith("all ranks are waiting in collectives")


@needs_pyspy
def test_ranks_started_by_hand_find_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes of no common launcher are one job by their address; a shell around one is none."""
    write_script(tmp_path, HEAD + SLEEPS)
    port = free_port()
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shell = 'RANK=1 bash -c \'exec 9>&1; "$0" train.py; true\' "$0" & RANK=0 exec "$0" train.py'
    with running(["bash", "-c", shell, sys.executable], tmp_path, **env) as job:
        _, verdict = ask(job.process.pid, capsys, until=1)
    assert 1 in verdict["culprits"]
    assert "ranks 0, 1 of 2 are here" in verdict["notes"]


@needs_pyspy
def test_ranks_of_ours_are_told_with_their_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under `rankwise run` the collective has its number, and it is said whose ranks they are."""
    write_script(tmp_path, HEAD + SLEEPS)
    with start_rankwise(["--nproc-per-node", "2", "--hang-timeout", "off", "train.py"], tmp_path) as job:
        wait_until(lambda: all((tmp_path / f"there{rank}").exists() for rank in range(2)), timeout_s=40)
        _, verdict = ask(job.process.pid, capsys, until=1)
    assert "all_reduce #2" in verdict["message"]
    assert any("`rankwise run`" in note for note in verdict["notes"])


LOADS = """
class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, number):
        if rank == 1:
            pathlib.Path("there1").touch()
            threading.Event().wait()  # a server that never answers
        return one
if rank == 0:
    pathlib.Path("there0").touch()
for batch in torch.utils.data.DataLoader(Files(), num_workers=1, timeout=0):
    dist.all_reduce(one)
"""


@needs_pyspy
def test_a_worker_that_a_rank_waits_for_is_named_by_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A DataLoader's worker that never returns: `rankwise why` and the launcher's report name its line, as the launcher does while it waits, and not only the rank's loop."""
    head = HEAD.replace("import os,", "import threading, torch.utils.data, os,").replace(
        'pathlib.Path(f"there{rank}").touch()\n', ""
    )
    script = write_script(tmp_path, head + LOADS)
    command = [*RANKWISE, "--nproc-per-node", "2", "--hang-timeout", "15", "train.py"]
    with running(command, tmp_path) as job:
        place = f"whose worker is at train.py:{line_of(script, 'threading.Event()').rpartition(':')[2]}"
        said = ""

        def ask_why() -> bool:
            nonlocal said
            main(["why", str(job.process.pid)])
            said = capsys.readouterr().out
            return place in said

        wait_until(ask_why, timeout_s=12)
        result = job.finish(60)
    assert "it may just be slow" in said
    assert result.err.count(place) == 2, result.err  # while it waits, and in the report
    assert "give it a timeout" in result.err


@pytest.mark.parametrize(
    "words", ["", "Error: Permission denied (os error 13)", "Error: Failed to find python version"]
)
def test_without_stacks_the_kernels_word_is_told_in_a_line(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """py-spy missing, refused or at a loss: exit code 2, what to do, and states, CPU and the kernel's function in one line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    if words:
        (folder / "py-spy").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        (folder / "py-spy").chmod(0o755)
    python = os.path.realpath(f"/proc/{os.getpid()}/exe")
    with sleeping(python, 2) as pids:
        assert main(["why", str(pids[0])]) == 2
    said = capsys.readouterr().out
    expected = {
        "": "pip install py-spy",
        "Error: P": "SYS_PTRACE",
        "Error: F": "Failed to find python",
    }
    assert expected[words[:8]] in said
    (line,) = [line for line in said.splitlines() if "the kernel says: " in line]
    assert "rank 0 running, 0 % CPU" in line
    assert "rank 1 running" in line


@contextmanager
def sleeping(python: str, num_ranks: int, **env: str) -> Iterator[list[int]]:
    """Run processes that have a rank's environment, and sleep."""
    alike = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
    ranks = [
        subprocess.Popen(
            [python, "-c", "import time; print(flush=True); time.sleep(1000)"],
            env={"RANK": str(rank), **alike}, stdout=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()
        yield [rank.pid for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


#: Starts two processes with a rank's environment, and one of them a worker that inherits it; writes their numbers, and stays.
LAUNCHER = """
import os, subprocess, sys, time
worker = "import time; time.sleep(1000)"
rank = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {!r}]); print(flush=True); time.sleep(1000)".format(worker)
pids = []
for number in range(2):
    env = {**os.environ, **{name: value.format(number) for name, value in eval(sys.argv[1]).items()}}
    process = subprocess.Popen([sys.executable, "-c", rank], env=env, stdout=subprocess.PIPE)
    process.stdout.readline()  # it has its worker
    pids.append(process.pid)
print(*pids, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({"SLURM_JOB_ID": "{}"}, {"SLURM_PROCID": "{}", "SLURM_NTASKS": "2"}),
        ({}, {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2"}),
        # What runs a pod gives it a number, which is no rank of torchrun's.
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "2950{}"},
            {"RANK": "{}", "WORLD_SIZE": "2", "LOCAL_RANK": "{}"},
        ),
    ],
    ids=["slurm", "mpi", "pod"],
)
def test_ranks_are_known_by_what_their_launcher_tells_them(own: dict[str, str], names: dict[str, str]) -> None:
    """Slurm's and MPI's numbers count as well, a pod's own does not, and workers are no ranks; any rank's PID leads to the ranks of its job, and not to another's beside it."""
    words = [sys.executable, "-c", LAUNCHER, repr(names)]
    launchers = [subprocess.Popen(words, env=make_env({"SLURM_PROCID": None, **{name: value.format(number) for name, value in own.items()}}), stdout=subprocess.PIPE, text=True) for number in range(2)]  # fmt: skip
    try:
        for launcher in launchers:
            assert launcher.stdout is not None
            pids = [int(word) for word in launcher.stdout.readline().split()]
            found = [(one.rank, one.pid, one.world_size, one.is_ours) for one in find_ranks(launcher.pid)]
            assert found == [(0, pids[0], 2, False), (1, pids[1], 2, False)]
            assert find_ranks(pids[0]) == find_ranks(pids[1]) == find_ranks(launcher.pid)
    finally:
        kill_leftovers()
        for launcher in launchers:
            launcher.communicate()


def test_what_is_no_rank_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No such process, and a process without ranks: exit code 2, and which PID to give."""
    sleeper = subprocess.Popen(["sleep", "1000"], env={})
    try:
        assert main(["why", str(sleeper.pid)]) == 2
        assert "is not a rank" in capsys.readouterr().err
    finally:
        sleeper.kill()
        sleeper.wait()
    assert main(["why", str(sleeper.pid)]) == 2
    assert "there is no process" in capsys.readouterr().err
