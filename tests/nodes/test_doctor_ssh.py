"""`rankwise doctor --hosts`: real ssh daemons on hosts of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nodes.hosts import open_hosts
from nodes.ssh_daemons import needs_sshd, serve
from support import make_env, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nodes.hosts import Host

pytestmark = [pytest.mark.linux]

NAMES = ("host0", "host1", "host2")
HOSTS = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{number + 1} {name}\n" for number, name in enumerate(NAMES))
FLAGS = ("--only", "shared-memory,hostname", "--format", "json")


def doctor(host: Host, *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 90) -> tuple[int, str, str]:
    """Run the doctor on a host; give exit code, standard output and standard error."""
    command = [
        "nsenter",
        "--target",
        str(host.pid),
        "--net",
        "--uts",
        "--mount",
        sys.executable,
        "-m",
        "rankwise",
        "doctor",
        *args,
    ]
    done = subprocess.run(command, env=make_env(env), capture_output=True, text=True, timeout=timeout_s, check=False)
    return done.returncode, done.stdout, done.stderr


@needs_sshd
def test_one_command_looks_at_all_hosts(tmp_path: Path) -> None:
    """From the first host the two others are started by ssh; the answer has all three, every link, and nothing stays behind."""
    with open_hosts([HOSTS] * 3, tmp_path) as hosts, serve(hosts, tmp_path) as ssh:
        code, out, err = doctor(hosts[0], "--hosts", ",".join(NAMES), "--ssh", ssh, *FLAGS)
        told = json.loads(out)
        assert (code, [host["name"] for host in told["hosts"]], told["missing"]) == (0, list(NAMES), []), err
        assert {(link["source"], link["target"]) for link in told["links"] if link["outcome"] == "ok"} == {
            (a, b) for a in NAMES for b in NAMES if a != b
        }
        wait_until(lambda: not _list_doctors(), what="the end of all doctors")


@needs_sshd
def test_a_host_that_is_none_of_them_can_ask(tmp_path: Path) -> None:
    """From a login host, whose name is not in the list, the first host's answer is shown; a host without a daemon is named, by ssh's own words."""
    with open_hosts([HOSTS] * 3, tmp_path) as hosts, serve(hosts[:1], tmp_path) as ssh:
        code, out, err = doctor(hosts[2], "--hosts", "host0,host1", "--ssh", ssh, "--arrival-timeout", "4", *FLAGS)
        told = json.loads(out)
        assert (code, told["missing"]) == (1, ["host1"]), err
        assert "rankwise: ssh does not reach host1: ssh: connect to host host1 port 22: Connection refused" in err
        assert any(one["probe"] == "rendezvous" and one["hosts"] == ["host1"] for one in told["readings"])


@needs_sshd
def test_hosts_that_ssh_does_not_reach_keep_nobody_waiting(tmp_path: Path) -> None:
    """Without the first host of the list the second one holds the rendezvous; what is set here is set there, but for secrets."""
    env = {"NCCL_BUFFSIZE": "8388608", "NCCL_AUTH_TOKEN": "geheim"}
    with open_hosts([HOSTS] * 3, tmp_path) as hosts, serve(hosts[1:], tmp_path) as ssh:
        flags = ["--only", "nccl-variables", "--format", "json"]
        code, out, err = doctor(hosts[1], "--hosts", "host[0-2]", "--ssh", ssh, *flags, env=env)
        told = json.loads(out)
        assert (code, [host["name"] for host in told["hosts"]], told["missing"]) == (
            1,
            ["host1", "host2"],
            ["host0"],
        ), err
        assert "ssh does not reach host0" in err
        assert not any("did not arrive" in one["what"] for one in told["readings"])
        values = [one["facts"]["values"] for host in told["hosts"] for one in host["readings"]]
        assert [one["NCCL_BUFFSIZE"] for one in values] == ["8388608"] * 2
        assert "geheim" not in out + err


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_host_that_finds_nobody_is_looked_at_all_the_same(tmp_path: Path) -> None:
    """Nobody listens at the master's address: that stands before the host's own readings, in one JSON object."""
    with open_hosts([HOSTS] * 2, tmp_path) as hosts:
        place = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.77.0.1", "--arrival-timeout", "2"]
        code, out, _ = doctor(hosts[1], *place, "--only", "shared-memory", "--format", "json")
        told = json.loads(out)
        assert code == 1
        assert [(one["probe"], one["verdict"], one["class"]) for one in told["readings"]] == [
            ("rendezvous", "fail", "I2")
        ]
        assert [one["probe"] for one in told["hosts"][0]["readings"]] == ["shared-memory"]


def _list_doctors() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"--end-with-input" in words:
                found.append(path.parent.name)
    return found
