"""Hosts for tests: network, host name and /etc/hosts of their own, joined by a cable, or by a switch."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil
import pytest

from python_forks import ForkedPython
from support import make_env, plan_fork, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


NETWORK = "10.77.0"


class Host:
    """A host, as long as its first process lives.

    Args:
        number: From 0: its address is ``10.77.0.(number + 1)``, its interface ``cable``.
        hosts_file: What its /etc/hosts says.
        folder: Where to keep that.
        lifetime_s: It ends by itself after so long.
    """

    def __init__(self, number: int, hosts_file: str, folder: Path, lifetime_s: int = 300) -> None:
        self.name, self.address = f"host{number}", f"{NETWORK}.{number + 1}"
        self.env: dict[str, str] = {}  # of all that is started there
        self._hosts = folder / f"hosts{number}"
        self._hosts.write_text(hosts_file)
        self._first = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sleep", str(lifetime_s)], env=make_env()
        )
        self.pid = self._first.pid
        ours = Path("/proc/self/ns/net").readlink()
        wait_until(lambda: Path(f"/proc/{self.pid}/ns/net").readlink() != ours, what="a network namespace")

    def call(self, *command: str) -> None:
        """Run a command there, to its end."""
        subprocess.run([*self.enter(), *command], check=True, timeout=20, env=make_env())

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str | None] | None = None,
        *,
        folder: Path | None = None,
        log: IO[str] | None = None,
    ) -> subprocess.Popen[str] | ForkedPython:
        """Start a command there, `rankwise run` and torchrun by a fork of a Python that has imported them; both its streams go to the log, or come in one pipe."""
        wanted = make_env({**self.env, **(env or {})})
        words, options = plan_fork(command)
        if words:
            fds = {2: subprocess.STDOUT} if log is None else {1: log.fileno(), 2: subprocess.STDOUT}
            return ForkedPython(words, wanted, folder, fds, host_pid=self.pid, **options)
        inside = [] if folder is None else ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
        return subprocess.Popen(
            [*self.enter(), *inside, *command],
            env=wanted,
            stdout=subprocess.PIPE if log is None else log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def list_processes(self) -> list[psutil.Process]:
        """Return all that run there, but for the host's first: also a helper that was forked elsewhere, and is nobody's child there."""
        network, found = Path(f"/proc/{self.pid}/ns/net").readlink(), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if process.pid != self.pid and Path(f"/proc/{process.pid}/ns/net").readlink() == network:
                    found.append(process)
        return found

    def set_up(self) -> None:
        """Give it its name, its /etc/hosts and its address."""
        self.call("hostname", self.name)
        self.call("mount", "--bind", str(self._hosts), "/etc/hosts")
        self.call("ip", "link", "set", "lo", "up")
        self.call("ip", "addr", "add", f"{self.address}/24", "dev", "cable")
        self.call("ip", "link", "set", "cable", "up")

    def close(self) -> None:
        """End it."""
        self._first.kill()
        self._first.wait()

    def enter(self) -> list[str]:
        """Return what to put in front of a command that is to run there."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]


@contextlib.contextmanager
def open_hosts(hosts_files: Sequence[str], folder: Path, lifetime_s: int = 300, losses: Path | None = None) -> Iterator[list[Host]]:  # fmt: skip
    """Make hosts: two are joined by a cable, more by a switch; skip the test where that is not allowed.

    Args:
        hosts_files: What the /etc/hosts of each says.
        folder: Where to keep those.
        lifetime_s: They end by themselves after so long.
        losses: Says what share of the frames the switch loses, as lossy_switch.py reads it; the kernel's switch loses none.
    """
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this container may not make network namespaces")
    hosts: list[Host] = []
    switch: subprocess.Popen[bytes] | None = None
    try:
        hosts += [Host(number, text, folder, lifetime_s) for number, text in enumerate(hosts_files)]
        if len(hosts) == 2 and losses is None:
            pids = [str(host.pid) for host in hosts]
            cable = ["ip", "link", "add", "cable", "netns", pids[0], "type", "veth", "peer", "name", "cable"]
            subprocess.run([*cable, "netns", pids[1]], check=True, timeout=20)
        else:
            switch = _open_switch(hosts, losses, lifetime_s)
        for host in hosts:
            host.set_up()
        yield hosts
    finally:
        for host in hosts:
            host.close()
        if switch is not None:
            switch.kill()
            switch.wait()


@contextlib.contextmanager
def serve_resident(hosts: Sequence[Host], folder: Path) -> Iterator[None]:
    """Give each host a resident server, which imports torch for all launchers there; end these servers."""
    env = {"RANKWISE_RESIDENT": "always", "RANKWISE_RESIDENT_FOLDER": str(folder / "residence")}
    for host in hosts:
        host.env |= env
    yield
    command = [sys.executable, "-m", "rankwise", "resident", "stop"]
    subprocess.run(command, env=make_env(env), stdout=subprocess.DEVNULL, check=True, timeout=60)


def make_hosts_file(count: int, changes: Mapping[str, str] | None = None) -> str:
    """Return an /etc/hosts that knows all hosts; ``changes`` gives other addresses to some names, or none (an empty text)."""
    known = {f"host{number}": f"{NETWORK}.{number + 1}" for number in range(count)} | dict(changes or {})
    return "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in known.items() if address)


def _open_switch(hosts: Sequence[Host], losses: Path | None, lifetime_s: int) -> subprocess.Popen[bytes]:
    """Join hosts by a bridge, in a namespace of its own: the cable of host 2 is there ``port2``. With ``losses``, by a program."""
    ours = Path("/proc/self/ns/net").readlink()
    ports = [f"port{number}" for number in range(len(hosts))]
    command = ["sleep", str(lifetime_s)]
    if losses is not None:
        # It begins once its ports are there.
        program = [sys.executable, str(Path(__file__).with_name("lossy_switch.py")), str(losses), *ports]
        command = ["sh", "-c", f"read go; exec {shlex.join(program)}"]
    switch = subprocess.Popen(["unshare", "--net", *command], env=make_env(), stdin=subprocess.PIPE)
    wait_until(lambda: Path(f"/proc/{switch.pid}/ns/net").readlink() != ours, what="a network namespace")
    lines = [] if losses is not None else ["link add switch type bridge", "link set switch up"]
    for port, host in zip(ports, hosts, strict=True):
        lines.append(f"link add {port} type veth peer name cable netns {host.pid}")
        lines.append(f"link set {port} {'master switch ' if losses is None else ''}up")
    subprocess.run(
        ["nsenter", "--target", str(switch.pid), "--net", "ip", "-batch", "-"],
        input="\n".join(lines).encode(), check=True, timeout=20,
    )  # fmt: skip
    if switch.stdin is not None:
        switch.stdin.write(b"go\n")
        switch.stdin.close()
    return switch
