"""The launcher where things are different: without a supervisor, beside the project's environment, short of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
import venv
from pathlib import Path

import pytest

import rankwise
from support import Running, leftovers, list_marked, read_report, run_rankwise, wait_until, write_script

pytestmark = pytest.mark.linux

# What is true of macOS for the launcher: no prctl, no adoption of orphans, no moving of descriptors.
_WITHOUT_SUPERVISOR = """
from rankwise.base import os_calls

os_calls.IS_LINUX, os_calls._LIBC = False, None
from rankwise.cli.main import entry

entry("run")
"""
_GROUPS = Path("/sys/fs/cgroup/memory")


def without_supervisor() -> tuple[str, ...]:
    """Return a launcher that believes to be on a system with neither prctl nor the adoption of orphans."""
    return (sys.executable, "-c", _WITHOUT_SUPERVISOR)


def test_ranks_reduce_without_a_supervisor(tmp_path: Path) -> None:
    """On a system without prctl the ranks meet and finish as well."""
    write_script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        t = torch.ones(1)
        dist.all_reduce(t)
        open(f"sum{dist.get_rank()}", "w").write(str(t.item()))
        dist.destroy_process_group()
        """,
    )
    result = run_rankwise(["--nproc-per-node", "2", "train.py"], tmp_path, launcher=without_supervisor())
    assert result.code == 0, result.err
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


def test_the_first_cause_is_named_without_a_supervisor(tmp_path: Path) -> None:
    """The report names the rank that raised, its line and its traceback; the other rank is stopped."""
    script = write_script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("no supervisor")
        time.sleep(30)
        """,
    )
    args = ["--nproc-per-node", "2", "--report", "report.json", "train.py"]
    result = run_rankwise(args, tmp_path, launcher=without_supervisor())
    report = read_report(tmp_path / "report.json")
    assert (result.code, report["culprits"], report["where"]) == (1, [1], f"{script}:3")
    assert "no supervisor" in report["traceback"]


def test_a_killed_launcher_is_noticed_without_a_supervisor(tmp_path: Path) -> None:
    """Ranks and store see by the end of a pipe that the launcher was killed with -9, and end."""
    write_script(tmp_path, "import os, time\nopen(os.environ['RANK'], 'w').close()\ntime.sleep(60)\n")
    running = Running([*without_supervisor(), "--nproc-per-node", "2", "train.py"], tmp_path)
    wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), what="two ranks")
    # The store's process imports torch first: it must see the end of the pipe once it serves.
    running.send(signal.SIGKILL)
    assert running.finish().code == -signal.SIGKILL
    assert leftovers(wait_s=15) == []


@pytest.fixture(scope="module")
def launcher_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment as pipx and uvx do: the launcher in it, and nothing else."""
    folder = tmp_path_factory.mktemp("pipx") / "env"
    venv.create(folder, symlinks=True, with_pip=False)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    # As an installation would: the package's own files, and no dependency.
    (site / "rankwise").symlink_to(Path(rankwise.__file__).parent)
    return folder / "bin" / "python"


def test_the_launcher_lives_beside_the_projects_environment(tmp_path: Path, launcher_environment: Path) -> None:
    """A launcher in an environment without torch runs the ranks in the active one, recorder and store included."""
    write_script(
        tmp_path,
        """
        import importlib.util, sys, torch, torch.distributed as dist
        assert importlib.util.find_spec("torch") is not None
        dist.init_process_group("gloo")
        t = torch.ones(1)
        dist.all_reduce(t)
        if dist.get_rank() == 1:
            raise ValueError(sys.prefix)
        dist.all_reduce(t)
        """,
    )
    args = ["--nproc-per-node", "2", "--report", "report.json", "train.py"]
    launcher = (str(launcher_environment), "-m", "rankwise.run")
    result = run_rankwise(args, tmp_path, launcher=launcher, env={"VIRTUAL_ENV": sys.prefix})
    report = read_report(tmp_path / "report.json")
    assert (report["culprits"], report["message"]) == ([1], f"rank 1: ValueError: {sys.prefix}"), result.err
    assert "the ranks run in" in result.err


def test_an_environment_without_torch_is_named(tmp_path: Path, launcher_environment: Path) -> None:
    """Without torch anywhere the launcher says which Python it looked at and what to install."""
    write_script(tmp_path, "print('never')\n")
    launcher = (str(launcher_environment), "-m", "rankwise.run")
    env = {"VIRTUAL_ENV": None, "CONDA_PREFIX": None, "PATH": "/nowhere"}
    result = run_rankwise(["train.py"], tmp_path, launcher=launcher, env=env)
    assert (result.code, result.out) == (2, "")
    assert f"there is no torch in {launcher_environment}" in result.err
    assert "pip install 'rankwise[torch]'" in result.err


def test_a_program_without_torch_runs(tmp_path: Path, launcher_environment: Path) -> None:
    """With --no-python nobody knows which Python the program will use: then rank 0 is left to serve the store."""
    script = write_script(tmp_path, '#!/bin/sh\necho "$RANK $TORCHELASTIC_USE_AGENT_STORE"\n', "train.sh")
    script.chmod(0o755)
    launcher = (str(launcher_environment), "-m", "rankwise.run")
    env = {"VIRTUAL_ENV": None, "CONDA_PREFIX": None, "PATH": "/bin:/nowhere"}
    result = run_rankwise(["--nproc-per-node", "2", "--no-python", "./train.sh"], tmp_path, launcher=launcher, env=env)
    assert sorted(result.out.split("\n")) == ["", "0 False", "1 False"], result.err


def _limit_memory(bytes_allowed: int) -> Path:
    """Make a memory cgroup below ours, or skip with the reason."""
    own = next((line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
                if line.split(":")[1] == "memory"), None)  # fmt: skip
    if own is None:
        pytest.skip("needs the memory controller of cgroup v1 (v2 gives it only to a delegated group)")
    parent = _GROUPS / own.lstrip("/")
    group = (parent if parent.is_dir() else _GROUPS) / f"rankwise-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(bytes_allowed))
    except OSError as error:
        pytest.skip(f"can't make a memory cgroup: {error}")
    return group


def test_a_rank_killed_for_memory_is_told_from_one_killed_by_hand(tmp_path: Path) -> None:
    """When the kernel kills a rank for memory, the report says so and counts the kills."""
    group = _limit_memory(1 << 30)
    write_script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            hoard = [bytearray(os.urandom(1 << 20) * 64) for _ in range(64)]
        time.sleep(60)
        """,
    )
    # Moved into the group before it starts, so that all it starts is counted there.
    move = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    command = ("/bin/sh", "-c", move, "sh", sys.executable, "-m", "rankwise.run")
    try:
        args = ["--nproc-per-node", "2", "--report", "report.json", "train.py"]
        result = run_rankwise(args, tmp_path, launcher=command)
        report = read_report(tmp_path / "report.json")
    finally:
        wait_until(lambda: not list_marked(), what="an empty group")
        group.rmdir()
    assert (result.code, report["kind"], report["culprits"]) == (137, "failure", [1]), result.err
    assert "oom_kill count went up by" in report["reason"]


def test_a_run_from_a_folder_that_is_gone(tmp_path: Path) -> None:
    """A current folder that was removed meanwhile is said in a line, not with a traceback."""
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd {gone}; rmdir {gone}; exec "$@"'
    command = ["/bin/sh", "-c", script, "sh", sys.executable, "-m", "rankwise.run", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_no_trouble(closed: str, tmp_path: Path) -> None:
    """With a standard stream closed the ranks run as with /dev/null there; no file of ours takes its number."""
    write_script(tmp_path, "import os, sys\nprint('out')\nopen('done', 'w').close()\n")
    command = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "rankwise.run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (done.returncode, (tmp_path / "done").exists()) == (0, True), done.stderr


def test_few_open_files_are_enough(tmp_path: Path) -> None:
    """Under a low soft limit many ranks start, and each keeps that limit; a low hard limit is an error in a line."""
    script = write_script(tmp_path, "#!/bin/sh\nulimit -Sn\n", "train.sh")
    script.chmod(0o755)

    def run(limit: str) -> tuple[int, str, str]:
        command = f'{limit} 24; exec "$@"'
        args = ["--nproc-per-node", "8", "--no-python", "./train.sh"]
        launcher = ("/bin/sh", "-c", command, "sh", sys.executable, "-m", "rankwise.run")
        result = run_rankwise(args, tmp_path, launcher=launcher)
        return result.code, result.out, result.err

    assert run("ulimit -Sn") == (0, "24\n" * 8, "")
    code, _, error = run("ulimit -n")
    assert code == 1
    assert "too many open files for 8 ranks" in error
    assert "Traceback" not in error


def test_an_interrupted_job_says_where_each_rank_was(tmp_path: Path) -> None:
    """Whoever presses Ctrl-C because nothing moves reads at which line each rank stood."""
    script = write_script(
        tmp_path,
        """
        import os, time
        open(os.environ["RANK"], "w").close()
        if os.environ["RANK"] == "0":
            time.sleep(60)
        time.sleep(61)
        """,
    )
    running = Running(
        [
            sys.executable,
            "-m",
            "rankwise.run",
            "--nproc-per-node",
            "2",
            "--report",
            "report.json",
            "train.py",
        ],
        tmp_path,
    )
    wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), what="two ranks")
    time.sleep(0.2)  # from the file to the line below it
    running.send(signal.SIGINT)
    assert running.finish().code == 130
    waiting = read_report(tmp_path / "report.json")["waiting"]
    assert [(one["rank"], one["where"]) for one in waiting] == [(0, f"{script}:4"), (1, f"{script}:5")]


def test_a_reader_that_takes_nothing_can_not_hold_the_job(tmp_path: Path) -> None:
    """With a reader of standard error that never reads, Ctrl-C twice still ends the job, and the report is written."""
    write_script(
        tmp_path,
        """
        import os, sys
        open("started", "w").close()
        while True:
            sys.stderr.write("x" * 10_000)
        """,
    )
    read_end, write_end = os.pipe()
    try:
        command = [sys.executable, "-m", "rankwise.run", "--report", "report.json", "train.py"]
        process = subprocess.Popen(command, cwd=tmp_path, stderr=write_end, start_new_session=True)
        wait_until((tmp_path / "started").exists, what="a rank")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        os.close(read_end)
        os.close(write_end)
    assert read_report(tmp_path / "report.json")["stopped_by"] == "SIGINT"
