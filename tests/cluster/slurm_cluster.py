"""A real Slurm of two nodes on this machine: its daemons in network namespaces of their own, all of its files in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, final

import pytest

from nodes.hosts import Host, make_hosts_file, open_hosts
from support import make_env, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DAEMONS = ("munged", "slurmctld", "slurmd")
#: What a user calls, and the tests with them.
_COMMANDS = ("sbatch", "salloc", "srun", "squeue", "sacct", "scontrol", "scancel", "sinfo")
_LIFETIME_S = 900

_SLURM_CONF = """
    ClusterName=rankwise
    SlurmctldHost=host0(10.77.0.1)
    SlurmUser=root
    AuthType=auth/munge
    # A requeued job starts again only after the credentials of its earlier run have expired: five seconds is the least.
    AuthInfo=socket={folder}/munge.socket,cred_expire=5
    StateSaveLocation={folder}/state
    SlurmdSpoolDir={folder}/%n
    SlurmctldPidFile={folder}/slurmctld.pid
    SlurmdPidFile={folder}/%n.pid
    SlurmctldLogFile={folder}/slurmctld.log
    SlurmdLogFile={folder}/%n.log
    ProctrackType=proctrack/linuxproc
    TaskPlugin=task/affinity
    MpiDefault=none
    ReturnToService=1
    SlurmdParameters=config_overrides
    SelectType=select/cons_tres
    SelectTypeParameters=CR_Core_Memory
    DefMemPerNode=2000
    SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,sched_interval=1,requeue_delay=1
    PreemptType=preempt/partition_prio
    PreemptMode=REQUEUE
    KillWait=10
    MessageTimeout=60
    JobAcctGatherType=jobacct_gather/linux
    JobAcctGatherFrequency=task=1
    # Ranks are forked, and share most of their memory.
    JobAcctGatherParams=OverMemoryKill,UsePss
    AccountingStorageType={storage}
    AccountingStorageHost=10.77.0.1
    AccountingStoragePass={folder}/munge.socket
    GresTypes=gpu
    NodeName=host0 NodeAddr=10.77.0.1 CPUs=8 RealMemory=8000 Gres=gpu:4
    NodeName=host1 NodeAddr=10.77.0.2 CPUs=8 RealMemory=8000 Gres=gpu:4
    PartitionName=train Nodes=host[0-1] Default=YES MaxTime=60 PriorityTier=1 GraceTime=60 OverSubscribe=NO
    PartitionName=urgent Nodes=host[0-1] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""
_SLURMDBD_CONF = """
    AuthType=auth/munge
    AuthInfo=socket={folder}/munge.socket
    DbdHost=host0
    DbdAddr=10.77.0.1
    SlurmUser=root
    StorageType=accounting_storage/mysql
    StorageHost=localhost
    StorageUser=root
    StorageLoc=slurm
    PidFile={folder}/slurmdbd.pid
    LogFile={folder}/slurmdbd.log
"""


@final
class SlurmCluster:
    """Slurm with the nodes host0, which is also the login node, and host1.

    Attributes:
        bin: A folder with `sbatch` and its kin, which speak with this Slurm from wherever they are called.
        has_accounting: Whether `sacct` knows jobs here.
    """

    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        self.folder, self.hosts = folder, hosts
        self.bin = folder / "bin"
        self.has_accounting = bool(shutil.which("mariadbd") and shutil.which("slurmdbd"))
        self._daemons: list[subprocess.Popen[bytes]] = []

    def call(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands to its end, and return both of its streams."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False, cwd=cwd, env=make_env(),
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command} exited with {done.returncode}: {done.stdout}"
        return done.stdout.strip()

    def start(self) -> None:
        """Start all daemons, and wait until both nodes take jobs."""
        for name in ("state", "host0", "host1", "bin"):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        storage = f"accounting_storage/{'slurmdbd' if self.has_accounting else 'none'}"
        self._write("slurm.conf", _SLURM_CONF, storage=storage)
        self._write("gres.conf", "NodeName=host[0-1] Name=gpu File={folder}/gpu[0-3]")
        for number in range(4):
            (self.folder / f"gpu{number}").touch()
        self._write("cgroup.conf", "CgroupAutomount=no")
        for name in _COMMANDS:
            self._write_command(name)
        where = self.folder
        self._run(
            0, "munged", "--foreground", "--force", "--num-threads=2", f"--key-file={where}/munge.key", f"--socket={where}/munge.socket",
            f"--pid-file={where}/munged.pid", f"--log-file={where}/munged.log", f"--seed-file={where}/munged.seed",
        )  # fmt: skip
        wait_until((where / "munge.socket").exists, what="munged")
        if self.has_accounting:
            self._start_accounting()
        config = ("-D", "-f", str(where / "slurm.conf"))
        self._run(0, "slurmctld", *config)
        for number, host in enumerate(self.hosts):
            self._run(number, "slurmd", *config, "-N", host.name)
        wait_until(self._is_idle, 60, "both nodes idle")

    def clean(self) -> None:
        """End all jobs, and take both nodes into service again."""
        self.call("scancel", "--user=root", check=False)
        self.call("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.call("scontrol", "update", "NodeName=host[0-1]", "State=RESUME", check=False)
        wait_until(lambda: self.call("squeue", "--noheader", check=False) == "", 30, "the end of all jobs")
        wait_until(self._is_idle, 30, "both nodes idle")

    def _is_idle(self) -> bool:
        return self.call("sinfo", "-h", "-N", "-p", "train", "-o", "%T", check=False) == "idle\nidle"

    def stop(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.clean()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        # Also what a slurmd has left that was ended in the middle of a job.
        for pid in self._list_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.wait()

    def _list_processes(self) -> dict[int, str]:
        """Return the command lines of all processes of our hosts, by process id, but for the one that holds each host."""
        networks = {os.readlink(f"/proc/{host.pid}/ns/net") for host in self.hosts}  # noqa: PTH115 - polled
        found = {}
        for entry in os.listdir("/proc"):  # noqa: PTH208 - polled
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") in networks:  # noqa: PTH115
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text(errors="replace")
        return {pid: line for pid, line in found.items() if pid not in {host.pid for host in self.hosts}}

    def _start_accounting(self) -> None:
        data, socket = self.folder / "mysql", self.folder / "mysql.socket"
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal", "--user=root", "--skip-test-db"],
            check=True, capture_output=True, timeout=120, env=make_env(),
        )  # fmt: skip
        self._run(
            0, "mariadbd", "--no-defaults", "--user=root", "--skip-networking", f"--datadir={data}", f"--socket={socket}",
            "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900", f"--pid-file={self.folder}/mysql.pid",
        )  # fmt: skip
        wait_until(socket.exists, 60, "mariadbd")
        self._write("slurmdbd.conf", _SLURMDBD_CONF)
        (self.folder / "slurmdbd.conf").chmod(0o600)
        log = self.folder / "slurmdbd.log"
        self._run(0, "slurmdbd", "-D", env={"MYSQL_UNIX_PORT": str(socket), "SLURM_CONF": str(self.folder / "slurm.conf")})  # fmt: skip
        wait_until(lambda: log.exists() and "started" in log.read_text(), 60, "slurmdbd")

    def _run(self, number: int, *command: str, env: dict[str, str] | None = None) -> None:
        with (self.folder / f"{command[0]}.{number}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen([*self.hosts[number].enter(), *command], env=make_env(env), stdout=out, stderr=out)
            )

    def _write(self, name: str, text: str, **values: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text).lstrip("\n").replace("{folder}", str(self.folder)).replace("{storage}", values.get("storage", "")))  # fmt: skip

    def _write_command(self, name: str) -> None:
        """Write a command that runs on the login node, in the folder from which it is called."""
        path = self.bin / name
        enter = " ".join(self.hosts[0].enter())
        path.write_text(
            f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {enter} sh -c \'cd "$0" && exec "$@"\' "$PWD" {shutil.which(name)} "$@"\n'
        )
        path.chmod(0o755)


@contextlib.contextmanager
def open_slurm(folder: Path) -> Iterator[SlurmCluster]:
    """Start a Slurm; skip where its programs are missing, or where hosts can't be made."""
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]} here: install Debian's packages slurm-wlm and munge (and slurmdbd and mariadb-server for sacct)")  # fmt: skip
    with open_hosts([make_hosts_file(2)] * 2, folder, _LIFETIME_S) as hosts:
        cluster = SlurmCluster(folder, hosts)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
