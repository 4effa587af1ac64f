"""A job of one rank on each of some hosts, whose nodes are killed, frozen or cut off."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psutil

from nodes.hosts import Host, make_hosts_file, open_hosts
from support import RANKWISE, wait_until, write_script

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from python_forks import ForkedPython

#: Each rank writes down after each step how many ranks have taken it, until a file says that it is enough.
STEP = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    with open(os.environ["OUT"], "a", buffering=1) as out:
        is_enough = False
        while not is_enough:
            total = torch.tensor([1.0, os.path.exists(os.environ["ENOUGH"])])
            dist.all_reduce(total)
            is_enough = bool(total[1])  # all leave after the same step
            out.write(f"{int(total[0])}\\n")
            time.sleep(0.05)
    os._exit(0)
"""


class Job:
    """A job of one rank on each of some hosts.

    Args:
        hosts: Those.
        folder: Where the script, and what the launchers say, is.
        nnodes: How many nodes the job may have.
        script: Writes down how many ranks have taken each step.
        env: Further variables of all launchers; "{}" in a value is the host's number.
    """

    def __init__(self, hosts: list[Host], folder: Path, nnodes: str, script: str = STEP, env: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.hosts, self.folder, self.nnodes, self._env = hosts, folder, nnodes, env or {}
        write_script(folder, script)
        self.launchers: list[subprocess.Popen[str] | ForkedPython] = []
        self._numbers: list[int] = []

    def start(self, *numbers: int) -> None:
        """Start the launchers of more hosts."""
        self.launchers += map(self._start, numbers)
        self._numbers += numbers

    def _start(self, number: int) -> subprocess.Popen[str] | ForkedPython:
        env = {"OUT": str(self.folder / f"steps{number}"), "ENOUGH": str(self.folder / "enough"), "GLOO_SOCKET_IFNAME": "cable"}  # fmt: skip
        env |= {name: value.format(number) for name, value in self._env.items()}
        words = ["--nnodes", self.nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29500", "--rdzv-id", "lost", "--nproc-per-node", "1"]  # fmt: skip
        command = [*RANKWISE, *words, "--log-dir", str(self.folder / f"logs{number}"), str(self.folder / "train.py")]  # fmt: skip
        with (self.folder / f"log{number}").open("a") as log:
            return self.hosts[number].start(command, env, log=log)

    def read(self, number: int) -> str:
        """Return what a node has said."""
        return (self.folder / f"log{number}").read_text()

    def wait_world(self, world: int, nodes: list[int], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until the ranks of these nodes take steps, so many together; ``meanwhile`` is called now and then."""
        sizes = {node: self._size(node) for node in nodes}

        def has_all() -> bool:
            meanwhile()
            return all(self._has_stepped(node, sizes[node], world) for node in nodes)

        wait_until(has_all, 60, f"steps of {world} on {nodes}")

    def _size(self, node: int) -> int:
        path = self.folder / f"steps{node}"
        return path.stat().st_size if path.exists() else 0

    def _has_stepped(self, node: int, behind: int, world: int) -> bool:
        if self._size(node) <= behind:
            return False
        with (self.folder / f"steps{node}").open() as file:
            file.seek(behind)
            return f"{world}\n" in file.readlines()

    def list_processes(self, number: int) -> list[psutil.Process]:
        """Return all processes of a launcher's host."""
        return self.hosts[self._numbers[number]].list_processes()

    def kill(self, number: int) -> None:
        """End all of a node's processes at once, as a loss of power does."""
        for process in self.list_processes(number):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launchers[number].wait()


@contextlib.contextmanager
def open_job(num_hosts: int, nnodes: str, folder: Path) -> Iterator[Job]:
    """Make the hosts, and end what is left of the job."""
    with open_hosts([make_hosts_file(num_hosts)] * num_hosts, folder) as hosts:
        made = Job(hosts, folder, nnodes)
        try:
            yield made
        finally:
            for process in [process for host in hosts for process in host.list_processes()]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for launcher in made.launchers:
                launcher.kill()
                launcher.wait()
                if launcher.stdout is not None:
                    launcher.stdout.close()
