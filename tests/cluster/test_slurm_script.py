"""The script that is given to sbatch, as a text: no Slurm is needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rankwise.cluster import slurm_state
from rankwise.cluster.handles import JobRecord
from rankwise.cluster.job import JobSpec
from rankwise.cluster.job_fields import Table
from rankwise.cluster.slurm import name_nodes
from rankwise.cluster.slurm_script import build_script, log_path
from rankwise.cluster.slurm_state import find_own_words


def build(**words: object) -> str:
    """Return the script of a job, which bash can read at least."""
    own = Table(words.pop("own", {}))  # type: ignore[arg-type]
    spec = JobSpec(**{"name": "line", "on": "slurm", "command": ("train.py",), "workdir": "/jobs", "own": own, **words})  # type: ignore[arg-type]
    text = build_script(spec)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"min_nodes": 3, "max_nodes": 3}, "#SBATCH --nodes=3\n"),
        ({"min_nodes": 2, "max_nodes": 3, "standby": 1}, "#SBATCH --nodes=3-4\n"),
        ({"standby": 1}, '--nnodes "1:$((SLURM_JOB_NUM_NODES - 1))"'),
        ({"standby": 1}, "--label --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --no-kill"),
        ({"time_s": 90061}, "#SBATCH --time=25:01:01\n#SBATCH --signal=USR1@120\n"),
        ({"time_s": 60}, "#SBATCH --signal=USR1@30\n"),
        ({"memory_bytes": 2**20 + 1}, "#SBATCH --mem=2M\n"),
        ({"workdir": "/my jobs/50%"}, "#SBATCH --output='/my jobs/50%%/line-%j.out' --open-mode=append\n"),
        ({"env": {"A": "it's $HOME"}}, "export A='it'\"'\"'s $HOME'\n"),
        ({"requeue": 2, "own": {"array": "0-3"}}, 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'),
        ({"own": {"array": "0-3"}}, "/jobs/line-%A_%a.out"),
        ({"image": "torch.sif", "gpus_per_node": 1, "ranks_per_node": "1"}, "apptainer exec --nv --bind /jobs --pwd /jobs torch.sif python3 -m rankwise run --standalone"),
        ({"image": "a/b", "checkpoint": "/kept"}, "--container-image=a/b --container-mounts=/jobs:/jobs,/kept:/kept --container-workdir=/jobs"),
        ({"own": {"setup": ("module load cuda",), "options": ("--exclusive",)}}, "#SBATCH --exclusive\n\nmodule load cuda\n"),
    ],
)  # fmt: skip
def test_words_become_options(words: dict[str, object], expected: str) -> None:
    """Each word of a job is where sbatch, srun or the launcher reads it."""
    assert expected in build(**words)


def test_a_job_that_is_not_to_come_back_does_not() -> None:
    """Without a requeue neither Slurm nor the script starts it again."""
    text = build()
    assert "#SBATCH --no-requeue\n" in text
    assert "scontrol requeue" not in text


@pytest.mark.parametrize(("codes", "expected"), [("0 137", 0), ("1 0 137", 1), ("137", 137), ("", 137)])
def test_a_launcher_that_was_killed_does_not_decide_how_a_job_has_ended(
    codes: str, expected: int, tmp_path: Path
) -> None:
    """With a node that stands by, the code is that of the launchers that are left, also where a killed one had time to write its own."""
    for name, text in {
        "scontrol": "echo host0",
        "srun": f'for word; do case $word in */.codes-*) printf "%s\\n" {codes or "$empty"} > "$word";; esac; done; exit 137',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host[0-2]", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3"}  # fmt: skip
    script = build(min_nodes=1, max_nodes=2, standby=1)
    done = subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == expected
    assert list(tmp_path.glob(".codes*")) == []


def test_the_log_is_where_the_script_writes_it() -> None:
    """The parts of an array have files of their own, which a pattern finds."""
    spec = JobSpec(name="line", on="slurm", command=("x",), workdir="/jobs", own=Table({"array": "0-3"}))
    assert str(log_path(spec, "12")) == "/jobs/line-12_*.out"


def test_the_causes_that_slurm_prints_are_found(tmp_path: Path) -> None:
    """Lines in which its daemons say why they killed are quoted once; those of ranks, of a plain end, and of an earlier run are not."""
    causes = [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the step tasks have been OOM Killed.",
        "srun: error: gpu1: task 1: Out Of Memory",
        "slurmstepd-gpu1: error: StepId=1.0 exceeded memory limit (223473664 > 62914560), being killed",
    ]
    others = ["[gpu1 rank 0]: error: out of memory", "srun: error: gpu1: task 1: Exited with exit code 1"]
    (tmp_path / "log").write_text("\n".join([*others, *causes, *causes]))
    assert find_own_words(tmp_path / "log") == causes
    ended = "slurmstepd-gpu1: error: *** JOB 9 ON gpu1 CANCELLED AT 2026-11-26T09:29:04 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
    (tmp_path / "log").write_text("\n".join([*causes, ended, *others]))
    assert find_own_words(tmp_path / "log", starts=2) == []


def test_each_line_says_its_node() -> None:
    """What a launcher prints gets the host of its ranks, in each run anew, and in each part of an array; Slurm's own lines stay as they are."""
    ended = "0: slurmstepd-gpu1: error: *** STEP 9.0 ON gpu1 CANCELLED AT 2026-11-26T09:29:04 DUE TO JOB REQUEUE ***"
    lines = [
        "0: rankwise: early",
        "0: [gpu1 rank 0]: a",
        "1: [gpu2 rank 8]: 7: b",
        "1: rankwise: late",
        ended,
        " 1: [gpu3 rank 8]: c",
        " 1: rankwise: again",
        "srun: error: x",
    ]
    first, second = Path("job-1_0"), Path("job-1_1")
    of_array = [
        *((first, line) for line in lines),
        (second, "1: rankwise: other"),
        (first, "1: rankwise: still"),
    ]
    assert list(name_nodes(iter(of_array))) == [
        "[node 0]: rankwise: early", "[gpu1 rank 0]: a", "[gpu2 rank 8]: 7: b", "[gpu2]: rankwise: late", f"[node 0]: {ended[3:]}",
        "[gpu3 rank 8]: c", "[gpu3]: rankwise: again", "srun: error: x", "[node 1]: rankwise: other", "[gpu3]: rankwise: still",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "phase", "exit_code", "reason"),
    [
        ("JobState=COMPLETED Reason=None Restarts=0 ExitCode=0:0 NodeList=gpu1", "succeeded", 0, ""),
        ("JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=1:0 NodeList=gpu1", "failed", 1, "FAILED (NonZeroExitCode) on gpu1"),
        ("JobState=FAILED Reason=NonZeroExitCode Restarts=2 ExitCode=75:0 NodeList=gpu1", "stopped", 75, "FAILED (NonZeroExitCode) on gpu1"),
        ("JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExitCode=0:15 NodeList=gpu1", "failed", 143, "TIMEOUT (TimeLimit) on gpu1"),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory Restarts=0 ExitCode=0:125 NodeList=gpu1", "failed", None, "OUT_OF_MEMORY (OutOfMemory) on gpu1"),
        ("JobState=CANCELLED Reason=None Restarts=0 ExitCode=0:15 NodeList=gpu1", "cancelled", None, "CANCELLED on gpu1"),
        ("JobState=PENDING Reason=QOSMaxGRESPerUser Restarts=0 ExitCode=0:0 NodeList=", "waiting", None, "PENDING (QOSMaxGRESPerUser)"),
        ("JobState=COMPLETED Restarts=0 ExitCode=0:0 NodeList=a\nJobId=2 JobState=RUNNING Restarts=1 ExitCode=0:0 NodeList=b", "running", None, "RUNNING on b"),
    ],
)  # fmt: skip
def test_slurms_states_are_understood(
    said: str, phase: str, exit_code: int | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that has not succeeded never has exit code 0; parts of an array count as one."""
    monkeypatch.setattr(slurm_state, "run_tool", lambda *_, **__: f"JobId=1 JobName=a=b c {said}\n")
    record = JobRecord(
        id="x", on="slurm", name="x", folder=tmp_path, native_id="1", facts={"log": str(tmp_path / "log")}
    )
    state = slurm_state.find_state(record)
    assert (state.phase, state.exit_code, state.reason) == (phase, exit_code, reason)
