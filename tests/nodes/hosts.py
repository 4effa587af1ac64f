"""Hosts for tests: network, host name and /etc/hosts of their own, joined by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import make_env, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


NETWORK = "10.77.0"


class Host:
    """A host, as long as its first process lives.

    Args:
        number: 0 or 1: its address is ``10.77.0.(number + 1)``, its interface ``cable``.
        hosts_file: What its /etc/hosts says.
        folder: Where to keep that.
    """

    def __init__(self, number: int, hosts_file: str, folder: Path) -> None:
        self.name, self.address = f"host{number}", f"{NETWORK}.{number + 1}"
        self._hosts = folder / f"hosts{number}"
        self._hosts.write_text(hosts_file)
        self._first = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sleep", "300"], env=make_env()
        )
        self.pid = self._first.pid
        ours = Path("/proc/self/ns/net").readlink()
        wait_until(lambda: Path(f"/proc/{self.pid}/ns/net").readlink() != ours, what="a network namespace")

    def call(self, *command: str) -> None:
        """Run a command there, to its end."""
        subprocess.run([*self._enter(), *command], check=True, timeout=20, env=make_env())

    def start(
        self, command: Sequence[str], env: Mapping[str, str | None] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command there; both its streams come in one pipe."""
        return subprocess.Popen(
            [*self._enter(), *command],
            env=make_env(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

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

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]


@contextlib.contextmanager
def open_hosts(hosts_files: Sequence[str], folder: Path) -> Iterator[list[Host]]:
    """Make two hosts, joined by a cable; skip the test where that is not allowed."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    if subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this container may not make network namespaces")
    hosts: list[Host] = []
    try:
        hosts += [Host(number, text, folder) for number, text in enumerate(hosts_files)]
        pids = [str(host.pid) for host in hosts]
        cable = ["ip", "link", "add", "cable", "netns", pids[0], "type", "veth", "peer", "name", "cable"]
        subprocess.run([*cable, "netns", pids[1]], check=True, timeout=20)
        for host in hosts:
            host.set_up()
        yield hosts
    finally:
        for host in hosts:
            host.close()
