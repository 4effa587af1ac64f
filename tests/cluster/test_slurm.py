"""Jobs on a real Slurm of two nodes: what it does to them, and what we say of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import rankwise
from cluster.digits import go_on_here, put_digits
from cluster.slurm_cluster import SlurmCluster, open_slurm
from rankwise.base.clock import SYSTEM_CLOCK
from rankwise.base.errors import LaunchError, UsageError
from rankwise.cluster import handles
from support import make_env, wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.cluster.cluster import JobState
    from rankwise.cluster.submission import JobHandle

pytestmark = [pytest.mark.linux, pytest.mark.slow]

# Holds at some steps until it is told to stop, so that a test decides where a run ends.
TRAIN = """
    import sys, time, torch, rankwise
    from rankwise import checkpoint

    folder, *holds = sys.argv[1:]
    torch.set_default_dtype(torch.float64)
    with rankwise.init() as ctx:
        ctx.listen_for_stop()
        torch.manual_seed(0)
        model = rankwise.apply_ddp(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
        loader = rankwise.DataLoader(data, global_batch=16)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = checkpoint.load(folder, state) or 0
        print(f"begin at step {step} of {ctx.world_size}", flush=True)
        for epoch in loader.epochs(2):
            for inputs, targets in loader:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if str(step) in holds:
                    ctx.print(f"hold at step {step}")
                while True:
                    if ctx.should_stop():
                        checkpoint.save(folder, state, step=step)
                        ctx.print(f"stop at step {step}: {ctx.stop_reason}")
                        ctx.leave_for_requeue()
                    if str(step) not in holds:
                        break
                    time.sleep(0.05)
        if ctx.rank == 0:
            torch.save(list(model.parameters()), folder + ".pt")
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """One Slurm for all tests here: it takes ten seconds to start."""
    with open_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., JobHandle]]:
    """Return `rankwise.submit` of a user on the login node, in a folder with a training script."""
    write_script(tmp_path, TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{slurm.bin}:{os.environ['PATH']}")
    env = {"OMP_NUM_THREADS": "1", "RANKWISE_CHECK": "0"}

    def submit(*command: str, **words: Any) -> JobHandle:
        return rankwise.submit(list(command), **{"on": "slurm", "env": env, "time": "10m", "grace": "40s", **words})

    yield submit
    slurm.clean()


def wait_line(handle: JobHandle, text: str) -> None:
    """Wait until a job has printed something."""
    try:
        wait_until(lambda: any(text in line for line in handle.logs()), 90)
    except AssertionError:
        lines = "\n".join(handle.logs())
        raise AssertionError(f"{text!r} does not come: {handle.state()}\n{lines}") from None


def wait_phase(handle: JobHandle, phase: str, reason: str = "") -> JobState:
    """Wait until a job is in a phase, for some reason, and return the state."""
    seen: list[JobState] = []

    def is_there() -> bool:
        SYSTEM_CLOCK.sleep(0.2)
        seen.append(handle.state())
        return seen[-1].phase == phase and reason in seen[-1].reason

    try:
        wait_until(is_there, 60)
    except AssertionError:
        raise AssertionError(f"not {phase} {reason!r}: {seen[-1]}") from None
    return seen[-1]


def train_alone(folder: Path) -> list[Any]:
    """Return the weights of one process."""
    import torch

    subprocess.run(
        [sys.executable, "train.py", "alone"],
        cwd=folder,
        check=True,
        env=make_env(),
        capture_output=True,
        timeout=60,
    )
    return list(torch.load(folder / "alone.pt"))


@pytest.mark.timeout(300)
def test_a_preempted_job_comes_back_smaller_and_one_with_a_lost_node_comes_back(
    slurm: SlurmCluster, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    """A job of up to two nodes is preempted on one, goes on upon the other, loses that, and ends on both with one process's weights.

    Another one stops in time before its limit.
    """
    import torch

    words = {"nodes": "1:2", "ranks_per_node": 2, "gpus_per_node": 3, "requeue": 5}
    # Slurm looks for the end of jobs twice a minute, and this one's notice comes while the other one is moved about.
    late = submit("train.py", "late", "3", name="late", time="2m", grace="30s", options=["--nodelist=host0"])
    job = submit("train.py", "checkpoints", "6", "12", **words)
    wait_line(job, "hold at step 6")
    assert job.state().phase == "running"
    assert job.state().reason == "RUNNING on host[0-1]"

    urgent = slurm.call(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--gpus-per-node=3",
        "--nodelist=host0",
        "--output=/dev/null",
        "--wrap=sleep 300",
    )
    assert wait_phase(job, "waiting").starts == 1
    wait_line(job, "hold at step 12")
    assert job.state().reason == "RUNNING on host1"
    assert job.state().starts == 2

    slurm.call("scontrol", "update", "NodeName=host1", "State=DOWN", "Reason=ECC errors")
    # The controller knows only that the job waits; accounting, where there is any, knows why.
    wait_phase(job, "waiting", "after NODE_FAIL on host1 (host1: down, ECC errors)" * slurm.has_accounting)
    slurm.call("scontrol", "update", "NodeName=host1", "State=RESUME")
    slurm.call("scancel", urgent)
    wait_until(lambda: slurm.call("sinfo", "-h", "-n", "host1", "-p", "train", "-o", "%T") == "idle", 30)
    wait_until(lambda: urgent not in slurm.call("squeue", "-h", "-o", "%A").split(), 30)
    state = job.wait(timeout_s=60)
    assert (state.phase, state.exit_code, state.starts, state.reason) == ("succeeded", 0, 3, "")
    lines = list(job.logs(follow=True))
    assert [line for line in lines if "begin at" in line and "rank 0]" in line] == [
        "[host0 rank 0]: begin at step 0 of 4",
        "[host1 rank 0]: begin at step 6 of 2",
        "[host0 rank 0]: begin at step 12 of 4",
    ]
    assert any(line.startswith("[host1]: rankwise: stopped for a requeue") for line in lines), "\n".join(lines)
    assert {line.partition(":")[0] for line in job.logs(rank=3)} == {"[host1 rank 3]"}
    torch.testing.assert_close(torch.load("checkpoints.pt"), train_alone(tmp_path), rtol=1e-12, atol=0)
    state = late.wait(timeout_s=90)
    assert (state.phase, state.exit_code) == ("stopped", 75), "\n".join(late.logs())
    assert any("stop at step 3: SIGUSR1 on rank 0" in line for line in late.logs())


@pytest.mark.timeout(300)
def test_the_digits_go_on_here(slurm: SlurmCluster, submit: Callable[..., JobHandle], tmp_path: Path) -> None:
    """One job.toml: stopped by a notice on two nodes of Slurm and resumed on this machine, the losses are those of a run that nobody stopped."""
    put_digits(tmp_path)
    job = rankwise.submit(file="job.toml", on="slurm", env={"STOP_AFTER": "12"})
    state = job.wait(timeout_s=90)
    assert (state.phase, state.exit_code) == ("stopped", 75), "\n".join(job.logs())
    go_on_here(tmp_path)


# Without torch: what Slurm does with a job does not depend on it.
PLAIN = """
    import os, pathlib, sys, time
    from rankwise.base.requeue import REQUEUE, ask_requeue

    index = os.environ.get("SLURM_ARRAY_TASK_ID")
    print("begins", sys.argv[1:], "of", os.environ["WORLD_SIZE"], flush=True)
    match sys.argv[1]:
        case "raise":
            raise ValueError("no such data")
        case "fill":
            memory = b"x" * (1 << 30)
            time.sleep(60)
        case "leave once" if index == "1" and not pathlib.Path("left").exists():
            pathlib.Path("left").touch()
            ask_requeue()
            sys.exit(REQUEUE)
"""


@pytest.mark.timeout(300)
def test_slurm_says_how_jobs_have_ended(slurm: SlurmCluster, submit: Callable[..., JobHandle], tmp_path: Path) -> None:
    """An error, too much memory, a cancelled job that would be requeued, an array."""
    write_script(tmp_path, PLAIN, "plain.py")
    unwanted = submit("train.py", "unwanted", "3", requeue=9)
    failed = submit("--cold", "plain.py", "raise", name="failed")
    full = submit("--cold", "plain.py", "fill", name="full", memory="500M", gpus_per_node=1)
    array = submit("--cold", "plain.py", "leave once", name="parts", array="0-1", requeue=1)

    state = failed.wait(timeout_s=90)
    assert (state.phase, state.exit_code, state.reason) == ("failed", 1, "FAILED (NonZeroExitCode) on host0")
    assert any("ValueError: no such data" in line for line in failed.logs())
    state = full.wait(timeout_s=90)
    assert state.phase == "failed"
    assert "exceeded memory limit" in state.reason, state
    state = array.wait(timeout_s=90)
    assert (state.phase, state.exit_code) == ("succeeded", 0), state
    begins = [line for line in array.logs() if "begins" in line]
    assert len(begins) == 3, "\n".join(array.logs())

    wait_line(unwanted, "hold at step 3")
    unwanted.cancel()
    assert wait_phase(unwanted, "cancelled").reason.startswith("CANCELLED")
    assert slurm.call("squeue", "--noheader") == ""


def test_what_slurm_refuses_leaves_nothing_behind(
    slurm: SlurmCluster, submit: Callable[..., JobHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error has Slurm's own words, the job is in no queue, and it has no record."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"partition": "gpus"}, "Invalid partition name specified"),
        ({"gpus_per_node": 9}, "Requested node configuration is not available"),
        ({"nodes": 3}, "would never start it: Partition"),
        ({"memory": "900G"}, "Memory specification can not be satisfied"),
        ({"image": "nvcr.io#nvidia/pytorch"}, "this cluster's srun has no --container-image"),
    ]
    for words, said in refused:
        with pytest.raises((LaunchError, UsageError), match=re.escape(said)):
            submit("train.py", "x", **words)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(UsageError, match="can't submit the job: sbatch: No such file"):
            submit("train.py", "x")
    assert handles.list_records() == []
    assert list(handles.jobs_folder().iterdir()) == []
    assert slurm.call("squeue", "--noheader") == ""


@pytest.mark.timeout(300)
def test_an_allocation_is_used(slurm: SlurmCluster, submit: Callable[..., JobHandle], tmp_path: Path) -> None:
    """Within salloc a job is submitted to the nodes that one has, which may be too few; srun alone starts ranks that know each other."""
    write_script(
        tmp_path,
        "import rankwise, torch\nwith rankwise.init() as ctx: print('sum', rankwise.all_reduce(torch.ones(1)).item())\n",
        "add.py",
    )
    rankwise_ = f"{sys.executable} -m rankwise"
    lines = [
        f"{rankwise_} submit --on slurm --attach --nodes 2 --ranks-per-node 2 -- add.py; echo code $?",
        f"{rankwise_} submit --on slurm --nodes 3 -- add.py; echo code $?",
        f"srun --ntasks-per-node=1 {sys.executable} add.py",
        f"{rankwise_} jobs",
    ]
    (tmp_path / "session.sh").write_text("export OMP_NUM_THREADS=1\n" + "\n".join(lines))
    said = slurm.call("salloc", "--nodes=2", "--gpus-per-node=1", "--time=5", "bash", "session.sh", cwd=tmp_path)
    for host, rank in (("host0", 0), ("host0", 1), ("host1", 2), ("host1", 3)):
        assert f"[{host} rank {rank}]: sum 4.0" in said, said
    assert re.search(r"the job needs 3 nodes, and allocation \d+ has 2: host\[0-1\]", said), said
    assert re.findall(r"code (\d+)", said) == ["0", "2"]
    assert said.count("\nsum 2.0") == 2
    assert "has succeeded" in said


SUBMITIT = """
    import submitit, torch
    import rankwise

    def add() -> tuple[int, int, float]:
        with rankwise.init() as ctx:
            return ctx.rank, ctx.world_size, rankwise.all_reduce(torch.ones(1)).item()

    def add_with_variables() -> tuple[int, int, float]:
        submitit.helpers.TorchDistributedEnvironment().export()
        return add()

    executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
    executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=5, slurm_mem="2GB")
    for job in [executor.submit(add), executor.submit(add_with_variables)]:
        print(job.results())
"""


@pytest.mark.usefixtures("submit")
def test_ranks_of_submitit_know_each_other(tmp_path: Path) -> None:
    """A function that submitit runs on two nodes is two ranks to init(), with and without its own variables."""
    package = pytest.importorskip("submitit", reason="needs the package submitit").__file__
    env = make_env({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(package).parents[1])})
    script = write_script(tmp_path, SUBMITIT, "jobs.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    # On a busy host submitit asks for the jobs' states, too, and prints that this cluster keeps no accounts.
    results = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert results == ["[(0, 2, 2.0), (1, 2, 2.0)]"] * 2, done.stdout + done.stderr


RIDES = """
    import pathlib, socket, time, torch, rankwise
    with rankwise.init() as ctx:
        print("trains on", socket.gethostname(), flush=True)
        while not pathlib.Path("enough").exists():
            rankwise.all_reduce(torch.ones(1))
            time.sleep(0.05)
"""


def test_a_node_that_stands_by_replaces_a_lost_one(
    slurm: SlurmCluster, submit: Callable[..., JobHandle], tmp_path: Path
) -> None:
    """Slurm does not end a job for a lost node if one stands by, and the job's end is that of the launchers that are left."""
    write_script(tmp_path, RIDES, "rides.py")
    job = submit("rides.py", standby=1, name="rides")
    wait_line(job, "trains on")
    slurm.call("scontrol", "update", "NodeName=host1", "State=DOWN", "Reason=gone")
    wait_line(job, "Node failure on host1")
    wait_line(job, "trains on host0")
    (tmp_path / "enough").touch()
    state = job.wait(timeout_s=60)
    assert (state.phase, state.exit_code) == ("succeeded", 0), "\n".join(job.logs())
    assert list(tmp_path.glob(".codes*")) == []
