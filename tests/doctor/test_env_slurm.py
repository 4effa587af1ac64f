"""A real Slurm of two nodes, both on this machine: what `rankwise env` and `rankwise.init()` read in its steps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
_START_S, _STEP_S = 30.0, 80
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def find_program(name: str) -> str | None:
    """Return where a program is; daemons are often not on PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def find_processes(folder: Path) -> list[int]:
    """Return the processes that have a folder in their command or environment, this one left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in told and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A cluster that runs."""

    env: dict[str, str]

    def srun(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a step of a job of its own."""
        command = [str(find_program("srun")), *argv]
        return subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=_STEP_S, check=False)  # fmt: skip


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """Start munged, slurmctld and a slurmd for each of two nodes, in a folder of their own; nothing is left of them."""
    missing = [name for name in _NEEDED if find_program(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield start(folder, started)
    finally:
        stop(folder, started)
        shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, started: list[subprocess.Popen[bytes]]) -> Slurm:
    """Start all four, and return when both nodes are ready."""
    (folder / "munge").mkdir(mode=0o700)
    for name in ("state", "spool-n0", "spool-n1"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(_CONF.format(folder=folder, host=host, ports=[free_port() for _ in range(3)]))
    outer = ("SLURM_", "RANK", "WORLD_", "MASTER_", "LOCAL_", "PET_", "TORCHELASTIC_", "RANKWISE_", "CUDA_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)} | {"SLURM_CONF": str(conf)}

    def run(name: str, *argv: str) -> None:
        with (folder / f"{name}{len(started)}.log").open("wb") as log:
            command = [str(find_program(name)), *argv]
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True))  # fmt: skip

    munge = folder / "munge"
    run("munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={key}", f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
    wait((munge / "socket").exists, "munged opens no socket", folder)
    run("slurmctld", "-D", "-f", str(conf))
    for node in ("n0", "n1"):
        run("slurmd", "-D", "-f", str(conf), "-N", node)
    wait(lambda: ask_states(env) == ["IDLE", "IDLE"], "the nodes are not ready", folder)
    return Slurm(env=env)


def ask_states(env: dict[str, str]) -> list[str]:
    """Return what state the nodes are in."""
    told = subprocess.run(
        [str(find_program("scontrol")), "-o", "show", "nodes"], env=env, capture_output=True, text=True, timeout=20, check=False
    )  # fmt: skip
    return [word.partition("=")[2] for word in told.stdout.split() if word.startswith("State=")]


def wait(is_true: Callable[[], bool], why: str, folder: Path) -> None:
    """Return when something is so; each look at it is a system call or a process, so this is no busy loop of long."""
    end_s = time.monotonic() + _START_S
    while not is_true():
        if time.monotonic() > end_s:
            logs = "\n".join(path.read_text(errors="replace")[-200:] for path in folder.glob("*.log"))
            pytest.skip(f"Slurm does not start here: {why}\n{logs}")
        time.sleep(0.05)


def stop(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    """End all of it, steps that still run among it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in reversed(started):
            if process.poll() is None:
                process.send_signal(signum)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
    for pid in find_processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert all(process.poll() is not None for process in started)


def test_env_in_a_step(slurm: Slurm, tmp_path: Path) -> None:
    """Each task of a real srun on two nodes reads its own rank, and all read one place to meet."""
    script = f"{sys.executable} -m rankwise env --format json > {tmp_path}/$SLURM_PROCID.json"
    done = slurm.srun("-N", "2", "-n", "2", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(told):
        assert one["launcher"] == "srun (Slurm)"
        assert one["findings"] == []
        values = {name: value["value"] for name, value in one["identity"].items()}
        assert [values[name] for name in ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")] == [rank, 2, 0, 1, rank, 2]  # fmt: skip
        assert one["identity"]["rank"]["from"] == f"SLURM_PROCID={rank}"
        assert values["master_addr"] == "n0"
    assert told[0]["identity"]["master_port"] == told[1]["identity"]["master_port"]


def test_a_leftover_rank_in_a_step(slurm: Slurm) -> None:
    """RANK=0 WORLD_SIZE=1 from a login shell reaches all tasks of a real step; each of them is told."""
    done = slurm.srun("-N", "1", "-n", "2", sys.executable, "-m", "rankwise", "env", RANK="0", WORLD_SIZE="1")
    assert done.returncode == 1
    assert done.stdout.count("error: WORLD_SIZE=1, and Slurm has started 2 processes (SLURM_STEP_NUM_TASKS=2) [I12]") == 2  # fmt: skip


def test_init_in_a_step(slurm: Slurm, tmp_path: Path) -> None:
    """Two tasks of a real step find each other by rankwise.init(), at the port that both derive from job and step."""
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        import torch.distributed as dist
        import rankwise

        rankwise.init()
        total = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {int(total)}", flush=True)
        """)
    )
    done = slurm.srun("-N", "1", "-n", "2", sys.executable, str(script), MASTER_ADDR="127.0.0.1", CUDA_VISIBLE_DEVICES="")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == [
        "rank 0 of 2: 3",
        "rank 1 of 2: 3",
    ]


def test_the_doctor_needs_no_flag_in_a_step(slurm: Slurm) -> None:
    """Two tasks on each of two nodes: one of each node takes part, they find each other, and one of the four prints the answer."""
    address = find_own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    doctor = [
        sys.executable,
        "-m",
        "rankwise",
        "doctor",
        "--only",
        "shared-memory",
        "--format",
        "json",
    ]
    done = slurm.srun("-N2", "--ntasks-per-node=2", *doctor, MASTER_ADDR=address)
    told = json.loads(done.stdout)
    assert [host["node_rank"] for host in told["hosts"]] == [0, 1], done.stderr
    assert told["missing"] == []
    assert done.stderr.count("the whole report is on") == 1, done.stderr


def find_own_address() -> str | None:
    """Return an address of this machine that is not of the loopback interface."""
    import psutil

    addresses = [one.address for told in psutil.net_if_addrs().values() for one in told if one.family == socket.AF_INET]
    return next((one for one in addresses if not one.startswith("127.")), None)
