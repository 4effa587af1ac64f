"""Jobs over ssh: real daemons, on hosts with networks of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.commands import RANKWISE, call, enter, list_jobs, make_job_env
from cluster.digits import go_on_here, put_digits
from nodes.hosts import make_hosts_file, open_hosts
from nodes.ssh_daemons import needs_sshd, serve
from support import wait_until, write_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nodes.hosts import Host

pytestmark = [pytest.mark.linux, pytest.mark.timeout(300), needs_sshd]

#: What only ssh knows: the hosts themselves call each other by address.
CONFIG = """
    Host gpu0
        HostName 10.77.0.1
    Host gpu1
        HostName 10.77.0.2
"""
SLEEPER = """
    import time
    print("sleeps", flush=True)
    time.sleep(300)
"""


@contextlib.contextmanager
def open_cluster(folder: Path, number: int = 2) -> Iterator[tuple[list[Host], str]]:
    """Hosts that share this machine's files, each with a daemon, and the ssh command that is let in."""
    with open_hosts([make_hosts_file(number)] * number, folder) as hosts, serve(hosts, folder) as ssh:
        yield hosts, ssh


def at(host: Host) -> list[str]:
    return ["nsenter", "--target", str(host.pid), "--net", "--uts", "--mount"]


def list_processes(host: Host) -> list[tuple[int, str]]:
    """Return what runs on a host, beside what the test has put there: numbers and command lines."""
    found, network = [], Path(f"/proc/{host.pid}/ns/net").readlink()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if (path / "ns/net").readlink() == network and command and not command.startswith(("sleep ", "sshd", "/usr/sbin/sshd")):  # fmt: skip
                found.append((int(path.name), command))
    return found


def kill(host: Host, word: str) -> None:
    """Kill what runs on a host with a word in its command line."""
    pids = [pid for pid, command in list_processes(host) if word in command]
    assert pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_digits_train_alike_over_ssh_and_here(tmp_path: Path) -> None:
    """One job.toml, and hosts by the names of ~/.ssh/config: stopped by a notice on two hosts with exit code 75, resumed here by one process, the losses are those of a run that nobody stopped."""
    put_digits(tmp_path)
    config = write_script(tmp_path, CONFIG, "ssh_config")
    with open_cluster(tmp_path) as (hosts, ssh):
        aliases = ssh.replace("-F none", f"-F {config}")
        done = call(tmp_path, "submit", "--on", "ssh", "--ssh", aliases, "--env", "STOP_AFTER=12", at=at(hosts[0]))
        assert done.returncode == 75, done.stdout + done.stderr
        assert "has stopped, and can be resumed" in done.stderr
        assert re.search(r"(?m)^\[host[01] rank 0\]: rankwise: ", done.stdout)
        wait_until(lambda: not [one for host in hosts for one in list_processes(host)], 20, "nothing on the hosts")  # fmt: skip
    assert re.search(r"(?m)^\[host[01] rank 0\]: step +1/30  epoch 1/1  loss ", done.stdout), "metrics of all nodes"
    go_on_here(tmp_path)
    assert [job["phase"] for job in list_jobs(tmp_path)] == ["stopped", "succeeded", "succeeded"]


def test_hosts_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    """A host that is not reached, another script, a missing one, another torch, too few hosts: one error each, and no record is left; rsync mends what it can."""
    write_script(tmp_path, "print('hello from', __file__)")
    other = write_script(tmp_path, "print('old')", "other.py")
    with open_cluster(tmp_path) as (hosts, ssh):

        def submit(*args: str, hosts_: str = "host0,host1") -> subprocess.CompletedProcess[str]:
            return call(tmp_path, "submit", "--on", "ssh", "--ssh", ssh, "--hosts", hosts_, *args, at=at(hosts[0]))  # fmt: skip

        def fail(*args: str, hosts_: str = "host0,host1") -> str:
            done = submit(*args, "--", "--cold", "train.py", hosts_=hosts_)
            assert done.returncode in {1, 2}, done.stdout + done.stderr
            assert not list((tmp_path / "state" / "rankwise" / "jobs").glob("*"))
            return " ".join(done.stderr.split())

        assert "ssh does not reach host7: ssh: Could not resolve hostname host7" in fail(hosts_="host0,host7")
        assert "3 nodes are asked for, and hosts names 2" in fail("--nodes", "3")
        assert re.search(r"host0: .*/no/python.*-> name the Python of the hosts by python", fail("--python", "/no/python"))  # fmt: skip
        assert "host0 has no folder" in fail("--workdir", "absent")
        assert "it can't resolve 'nowhere'" in fail("--master-addr", "nowhere")
        hosts[1].call("mount", "--bind", str(other), str(tmp_path / "train.py"))
        said = fail()
        assert re.search(r"on host0, this machine, \w+ on host1", said)
        assert "the hosts differ: train.py is " in said
        hosts[1].call("umount", str(tmp_path / "train.py"))
        work = tmp_path / "work"
        work.mkdir()
        shutil.copy(tmp_path / "train.py", work)
        hosts[1].call("mount", "-t", "tmpfs", "none", str(work))
        assert f"train.py is not in {work} on host1" in fail("--workdir", "work")
        done = submit("--workdir", "work", "--files", "train.py", "--", "--cold", "train.py")
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.findall(r"(?m)^\[(host\d) rank (\d)\]: hello from (.*)$", done.stdout)
        assert sorted(one[0] for one in found) == ["host0", "host1"]
        assert sorted(one[1:] for one in found) == [("0", f"{work}/train.py"), ("1", f"{work}/train.py")]


def start(folder: Path, host: Host, ssh: str) -> subprocess.Popen[str]:
    """Submit a script that sleeps on both hosts, and wait until it does."""
    command = [*enter(at(host), folder), *RANKWISE, "submit", "--on", "ssh", "--ssh", ssh, "--hosts", "host0,host1", "--", "--cold", "train.py"]  # fmt: skip
    client = subprocess.Popen(command, cwd=folder, env=make_job_env(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    seen = set(folder.glob("state/rankwise/jobs/*/log"))
    wait_until(lambda: any(one.read_text().count("sleeps") == 2 for one in set(folder.glob("state/rankwise/jobs/*/log")) - seen), 90)  # fmt: skip
    return client


def test_a_job_that_may_shrink_outlives_a_host(tmp_path: Path) -> None:
    """All processes of one of two hosts are killed: the other one goes on alone, and the state says without whom."""
    script = """
        import os, pathlib, time
        print("is one of", os.environ["WORLD_SIZE"], flush=True)
        while not pathlib.Path("over").exists():
            time.sleep(0.1)
    """
    write_script(tmp_path, script)
    with open_cluster(tmp_path) as (hosts, ssh):
        command = [*enter(at(hosts[0]), tmp_path), *RANKWISE, "submit", "--on", "ssh", "--ssh", ssh, "--hosts", "host0,host1", "--nodes", "1:2", "--", "--cold", "train.py"]  # fmt: skip
        client = subprocess.Popen(command, cwd=tmp_path, env=make_job_env(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
        try:

            def count(text: str) -> int:
                return sum(one.read_text().count(text) for one in tmp_path.glob("state/rankwise/jobs/*/log"))

            wait_until(lambda: count("is one of 2") == 2, 90)
            kill(hosts[1], "python")
            wait_until(lambda: count("is one of 1"), 90)
            (tmp_path / "over").touch()
            assert client.wait(60) == 0
        finally:
            client.kill()
            print(client.communicate()[0])
        (job,) = list_jobs(tmp_path)
        assert (job["phase"], job["reason"]) == ("succeeded", "without host1")


def test_no_host_keeps_a_job_whose_command_is_gone(tmp_path: Path) -> None:
    """One Ctrl-C ends all; kill -9 of the command, or of the process that holds the job, ends both hosts' ranks and launchers."""
    write_script(tmp_path, SLEEPER)

    def is_empty() -> bool:
        return not [one for host in hosts for one in list_processes(host)]

    with open_cluster(tmp_path) as (hosts, ssh):
        client = start(tmp_path, hosts[0], ssh)
        client.send_signal(signal.SIGINT)
        out, _ = client.communicate(timeout=60)
        assert (client.returncode, "is told to stop" in out) == (143, True), out
        wait_until(is_empty, 20, "an empty cluster after Ctrl-C")
        client = start(tmp_path, hosts[0], ssh)
        client.kill()
        client.communicate()
        wait_until(is_empty, 30, "an empty cluster after kill -9 of the command")
        client = start(tmp_path, hosts[0], ssh)
        kill(hosts[0], "cluster.job_process")
        wait_until(is_empty, 30, "an empty cluster after kill -9 of the job's process")
        client.communicate()
        assert [job["phase"] for job in list_jobs(tmp_path)] == ["cancelled", "cancelled", "failed"]
