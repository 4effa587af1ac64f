"""Jobs on a real Ray with several raylets on this host, through the commands; and the driver's decisions alone."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cluster.commands import call
from cluster.digits import go_on_here, put_digits
from rankwise.base.errors import LaunchError, UsageError
from rankwise.base.requeue import REQUEUE
from rankwise.cluster import job, ray_jobs
from rankwise.cluster.cluster import JobState
from rankwise.cluster.handles import JobRecord
from rankwise.cluster.job_process import decide_outcome
from rankwise.cluster.ray_driver import first_words, from_text, to_bundle, to_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rankwise.cluster.job import JobSpec


_RECORD = JobRecord(id="x", on="ray", name="x", folder=Path(), facts={"address": "http://head:8265"})


async def _break_off(_: str) -> AsyncIterator[str]:
    yield "one\ntw"
    raise RuntimeError("Request failed with status code 502")


def test_a_log_that_breaks_off_is_an_error_in_rays_words() -> None:
    """Whoever follows a log gets its lines, and no traceback where the cluster's head is gone meanwhile."""
    lines = ray_jobs._follow(SimpleNamespace(tail_job_logs=_break_off), _RECORD)
    assert next(lines) == "one"
    with pytest.raises(LaunchError, match="can't follow the log: Ray: Request failed with status code 502"):
        next(lines)


async def _fall_silent(_: str) -> AsyncIterator[str]:
    yield "one\n"
    await asyncio.Event().wait()


def test_a_log_that_does_not_end_with_the_job_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the job runs, silence is waited for; two looks after its end, an error names the job."""
    states = [JobState(phase="running"), JobState(phase="running"), JobState(phase="succeeded")]
    monkeypatch.setattr(ray_jobs, "state", lambda _: states.pop(0))
    monkeypatch.setattr(ray_jobs, "_LOOK_S", 0.02)
    lines = ray_jobs._follow(SimpleNamespace(tail_job_logs=_fall_silent), _RECORD)
    assert next(lines) == "one"
    with pytest.raises(LaunchError, match="job x is over, and Ray, which follows its log, has sent nothing"):
        next(lines)
    assert states == []


def test_ctrl_c_leaves_a_log_without_a_word(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Who stops following gets no complaint of asyncio's about a task that was under way."""
    monkeypatch.setattr(ray_jobs, "state", lambda _: JobState(phase="running"))
    lines = ray_jobs._follow(SimpleNamespace(tail_job_logs=_fall_silent), _RECORD)
    assert next(lines) == "one"
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    del lines
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_head_that_is_frozen_is_not_waited_for() -> None:
    """Ray's SDK has no bound for its requests: who asks gets an error in time."""
    thawed = threading.Event()
    with pytest.raises(LaunchError, match="can't ask for the job: Ray: no return within"):
        ray_jobs._ask(thawed.wait, "ask for the job", timeout_s=0.05)
    thawed.set()


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[default]")
_TESTS = Path(__file__).parents[1]
#: Leaves by 75 when it is started first, and adds up over all ranks when it is started again.
TWICE = """
import pathlib, sys, torch, rankwise
with rankwise.init() as ctx:
    marks = pathlib.Path(sys.argv[1])
    is_first = not (marks / "once").exists()
    rankwise.barrier()
    if is_first:
        (marks / "once").touch()
        ctx.leave_for_requeue()
    total = rankwise.all_reduce(torch.tensor(float(ctx.rank + 1)))
    print("total", total.item(), "of", ctx.world_size, pathlib.Path("train.py").exists(), flush=True)
"""
#: On the second node, kills the actor that its launcher belongs to; on the first one, it waits.
DEATH = """
import os, pathlib, psutil, signal, sys, time
pathlib.Path(sys.argv[1], f"launcher-{os.environ['RANK']}").write_text(str(os.getppid()))
while len(list(pathlib.Path(sys.argv[1]).glob("launcher-*"))) < 2:
    time.sleep(0.1)
if os.environ["RANK"] == "1":
    one = next(one for one in psutil.Process().parents() if "ray::NodeLauncher" in " ".join(one.cmdline()))
    one.kill()
time.sleep(600)
"""
#: Waits for its node's end when it is started first.
LOST = """
import os, pathlib, sys, time
marks = pathlib.Path(sys.argv[1])
if not (marks / "lost").exists():
    (marks / f"first-{os.environ['RANK']}").touch()
    time.sleep(600)
print("rank", os.environ["RANK"], "again", flush=True)
"""
ERROR = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no such data')\nimport time\ntime.sleep(600)\n"


class RayCluster:
    """A head and two raylets.

    Args:
        process: Holds them.
        address: The dashboard's.
    """

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process, self.address = process, address
        self.wait_for("up\n")

    def lose_node(self) -> None:
        """Kill a raylet on which a launcher runs, once another one is there."""
        assert self._process.stdin is not None
        self._process.stdin.write("lose\n")
        self._process.stdin.flush()
        self.wait_for("lost\n")

    def wait_for(self, line: str) -> None:
        """Wait until it says so."""
        assert self._process.stdout is not None
        said = []
        while (one := self._process.stdout.readline()) != line:
            said.append(one)
            if not one:
                pytest.fail("".join(said))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster of two raylets and a head."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(_TESTS / "ray_cluster.py"), str(port), "2"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:  # fmt: skip
        yield RayCluster(process, f"http://127.0.0.1:{port}")


@pytest.fixture
def address(cluster: RayCluster) -> str:
    """The dashboard of the cluster."""
    return cluster.address


def run(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of rankwise, with records of its own."""
    env = {**os.environ, "XDG_STATE_HOME": str(home / "state")}
    return subprocess.run([sys.executable, "-m", "rankwise", *words], env=env, cwd=home, capture_output=True, text=True, timeout=400, check=False)  # fmt: skip


def submit(address: str, home: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Submit a script to two nodes of one rank each, and wait for its end."""
    (home / "train.py").write_text(script)
    return run("submit", "--on", "ray", "--address", address, "--python", sys.executable, "--nodes", "2", "--attach", "--grace", "5s", *words, "--", "train.py", str(home), home=home)  # fmt: skip


def find_state(home: Path) -> dict[str, Any]:
    """Return what `rankwise jobs` says of the only job."""
    done = run("jobs", "--format", "json", home=home)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)[0]
    return found


@needs_ray
@pytest.mark.timeout(900)
def test_a_job_starts_again_after_exit_code_75(address: str, tmp_path: Path) -> None:
    """One launcher on each raylet; ranks meet, lines of all come to the client, the second start ends the job, and files are there."""
    done = submit(address, tmp_path, TWICE, "--requeue", "1", "--files", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    host = socket.gethostname()
    for rank in range(2):
        assert f"[{host} rank {rank}]: total 3.0 of 2 True" in done.stdout
    assert "started again (1 of 1)" in done.stdout
    state = find_state(tmp_path)
    assert (state["phase"], state["starts"], state["exit_code"]) == ("succeeded", 2, 0)
    assert "total 3.0" in run("logs", state["id"], "--rank", "1", home=tmp_path).stdout


@needs_ray
@pytest.mark.timeout(900)
def test_the_digits_go_on_here(address: str, tmp_path: Path) -> None:
    """One job.toml: stopped by a notice on two raylets, and resumed on this machine, the losses are those of a run that nobody stopped."""
    put_digits(tmp_path)
    own = ["--address", address, "--python", sys.executable, "--attach", "--env", "STOP_AFTER=12"]
    done = call(tmp_path, "submit", "--on", "ray", *own, timeout_s=400)
    assert done.returncode == REQUEUE, done.stdout + done.stderr
    go_on_here(tmp_path)


@needs_ray
@pytest.mark.timeout(900)
def test_the_death_of_an_actor_is_the_cause(address: str, tmp_path: Path) -> None:
    """Ray's own words are the reason, not what the other node says of its lost peer; and no launcher is left."""
    done = submit(address, tmp_path, DEATH)
    assert done.returncode == 1, done.stdout + done.stderr
    state = find_state(tmp_path)
    assert state["phase"] == "failed"
    assert " has died: The actor died unexpectedly" in state["reason"], done.stdout
    import psutil

    launchers = [int(path.read_text()) for path in tmp_path.glob("launcher-*")]
    assert len(launchers) == 2
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in launchers if psutil.pid_exists(pid)], timeout=60)  # fmt: skip
    assert not alive, gone


@needs_ray
@pytest.mark.timeout(900)
def test_a_lost_node_is_replaced(cluster: RayCluster, tmp_path: Path) -> None:
    """The job starts again on the nodes that are there, and the reason is in its log."""
    found: list[subprocess.CompletedProcess[str]] = []
    thread = threading.Thread(target=lambda: found.append(submit(cluster.address, tmp_path, LOST, "--requeue", "1")))
    thread.start()
    waiting = threading.Event()
    while len(list(tmp_path.glob("first-*"))) < 2 and thread.is_alive():
        waiting.wait(0.1)
    (tmp_path / "lost").touch()
    cluster.lose_node()
    thread.join()
    (done,) = found
    assert done.returncode == 0, done.stdout + done.stderr
    assert "started again (1 of 1): the actor on " in done.stdout
    assert "]: rank 0 again" in done.stdout
    assert "]: rank 1 again" in done.stdout


@needs_ray
@pytest.mark.timeout(900)
def test_an_error_is_reported_and_nothing_starts_again(address: str, tmp_path: Path) -> None:
    """The failure report of the node comes to the client, and the exit code is the script's, though a requeue is left."""
    done = submit(address, tmp_path, ERROR, "--requeue", "always")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: no such data" in done.stdout
    state = find_state(tmp_path)
    assert (state["phase"], state["starts"]) == ("failed", 1)
    assert state["reason"].startswith("exit code 1 on ")


@needs_ray
@pytest.mark.timeout(900)
def test_what_no_node_has_is_said(address: str, tmp_path: Path) -> None:
    """A placement group that can't be is one error: what was asked for, what there is."""
    done = submit(address, tmp_path, "", "--gpus-per-node", "8", "--wait-s", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Ray has no place for 2 nodes with 1 CPUs, 8 GPUs each (STRICT_SPREAD): of the cluster's 3 nodes 0 have that much" in find_state(tmp_path)["reason"]  # fmt: skip


@needs_ray
@pytest.mark.timeout(900)
def test_rays_own_command_does_the_same(address: str, tmp_path: Path) -> None:
    """What --dry-run prints can be run: `ray job submit`, here with its wait for the end."""
    (tmp_path / "train.py").write_text(
        "import os\nprint('rank', os.environ['RANK'], 'is', os.environ['A'], flush=True)\n"
    )
    shown = run("submit", "--on", "ray", "--address", address, "--python", sys.executable, "--nodes", "2", "--files", "train.py", "--env", "A=here 1", "--dry-run", "--", "train.py", home=tmp_path)  # fmt: skip
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    text = shown.stdout.replace(" --no-wait ", " ").replace('\nrm -r "$files"', "")
    done = subprocess.run(["sh", "-c", text], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 is here 1" in done.stdout
    assert "rank 1 is here 1" in done.stdout


def read(folder: Path, **words: object) -> JobSpec:
    """Read a job."""
    return job.read(None, {"on": "ray", "command": "train.py --lr '1 2'", **words}, ray_jobs.WORDS, folder)


def test_the_driver_reads_the_job_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a job is lost on its way, and no variable's value is in its text; what Ray holds for a node is what was asked for."""
    monkeypatch.setenv("A", "secret")  # as Ray does, by the runtime_env
    (tmp_path / "a").touch()
    spec = read(tmp_path, nodes="2:4", gpus_per_node=8, memory="64G", env=["A=secret"], files=["a"], strategy="PACK", wait_s=5)  # fmt: skip
    assert from_text(to_text(spec, "x-1")) == (spec, "x-1")
    assert "secret" not in to_text(spec, "x-1")
    assert to_bundle(spec) == {"CPU": 1.0, "GPU": 8.0, "memory": 64 * 2**30}


def test_dry_run_shows_rays_own_command(tmp_path: Path) -> None:
    """What would be submitted can be run by a shell: `ray job submit` with the driver behind it, and only the named files."""
    for name in ("train.py", "other.py", "conf/a b", "conf/__pycache__/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    spec = read(tmp_path, address="http://head:8265", files=["train.py", "conf"], env=["A=1 2"])
    (document,) = ray_jobs.render(spec, "x-1")
    ray = """ray() { printf '%s\\n' "$@"; (cd "$files" && find . -type f); }\n"""
    shown = subprocess.run(["sh", "-ec", ray + document.text], capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip
    files = shown[shown.index("--working-dir") + 1]
    assert shown[:-2] == ["job", "submit", "--address", "http://head:8265", "--submission-id", "x-1", "--runtime-env-json", '{"env_vars": {"A": "1 2"}}',
                          "--working-dir", files, "--no-wait", "--", "python3", "-m", "rankwise.cluster.ray_driver", to_text(spec, "x-1")]  # fmt: skip
    assert sorted(shown[-2:]) == ["./conf/a b", "./train.py"]
    assert not Path(files).exists()
    with pytest.raises(UsageError, match="image 'a': the containers of Ray's nodes"):
        ray_jobs.render(read(tmp_path, image="a"), "x-1")


def test_without_ray_the_error_says_so(tmp_path: Path) -> None:
    """The package that is missing is named; here one that can't be imported stands before it."""
    (tmp_path / "ray.py").write_text("raise ImportError('No module named ray')\n")
    (tmp_path / "train.py").touch()
    done = call(tmp_path, "submit", "--on", "ray", "--", "train.py", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0
    assert "pip install 'ray[default]'" in done.stderr


@pytest.mark.parametrize(("ends", "min_nodes", "outcome"), [
    ([("a", 0), ("b", 0)], 2, (0, "")),
    ([("a", REQUEUE), ("b", 0)], 2, (REQUEUE, "")),
    ([("b", 3), ("a", 1)], 2, (3, "exit code 3 on b")),
    ([("b", None), ("a", 1)], 2, (REQUEUE, "b was lost")),
    ([("b", None), ("a", 0)], 1, (0, "without b")),
    ([("b", None), ("a", 0)], 2, (REQUEUE, "b was lost")),
    ([("a", 1)], 1, (1, "exit code 1")),
])  # fmt: skip
def test_how_a_job_ends(ends: list[tuple[str, int | None]], min_nodes: int, outcome: tuple[int, str]) -> None:
    """A lost node is no error of the script: the job may start again; what only follows from the loss counts for nothing."""
    assert decide_outcome(ends, min_nodes) == outcome


def test_rays_words_are_told_without_its_ids() -> None:
    """Of an actor's death, the sentences stay, not the lists."""
    said = "The actor died unexpectedly before finishing this task.\n\tclass_name: NodeLauncher\n\tpid: 7\nThe actor is dead because its node has died."
    assert first_words(RuntimeError(said)) == "The actor died unexpectedly before finishing this task. The actor is dead because its node has died."  # fmt: skip
