"""What the host offers, read from trees made for the test."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rankwise.base import host
from rankwise.base.host import count_cores, count_gpus, find_port_holder, is_loopback, listen_tcp, share_cores


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup tree; this process is in /job/a of it, on eight cores of two threads each."""
    root = tmp_path / "sys/fs/cgroup"
    root.mkdir(parents=True)
    monkeypatch.setattr(host, "_ROOT", tmp_path)
    monkeypatch.setattr(host, "own_cgroups", lambda _: {"": "/job/a", "cpu": "/job/a", "cpuacct": "/job/a"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    real = host._read

    def read(path: Path) -> str:
        if path.name == "thread_siblings_list":
            cpu = int(path.parts[-3].removeprefix("cpu")) % 8
            return f"{cpu},{cpu + 8}"
        return real(path)

    monkeypatch.setattr(host, "_read", read)
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_hyper_threads_are_one_core(cgroup: Path) -> None:
    """Sixteen logical CPUs of eight cores are eight."""
    assert count_cores() == 8


def test_affinity_limits(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taskset and Slurm leave three CPUs of two cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 9, 2}, raising=False)
    assert count_cores() == 2


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("max 100000", 8),
        ("6400000 100000", 8),
        ("", 8),
    ],
)
def test_the_quota_of_cgroup_v2(cgroup: Path, limit: str, cores: int) -> None:
    """cpu.max is rounded up, never below 1 and never above the cores that there are."""
    _write(cgroup / "job" / "a" / "cpu.max", limit)
    assert count_cores() == cores


def test_the_tightest_limit_on_the_way_up_counts(cgroup: Path) -> None:
    """A limit may stand at any group above ours (a pod around its container), also at the root we see."""
    _write(cgroup / "job" / "a" / "cpu.max", "max 100000")
    _write(cgroup / "job" / "cpu.max", "300000 100000")
    _write(cgroup / "cpu.max", "700000 100000")
    assert count_cores() == 3


def test_a_container_sees_its_own_group_as_the_root(cgroup: Path) -> None:
    """The path of /proc/self/cgroup may be missing below the mount: then the mount's root counts."""
    _write(cgroup / "cpu.max", "200000 100000")
    assert count_cores() == 2


@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", 8), ("100000", 1)])
def test_the_quota_of_cgroup_v1(cgroup: Path, quota: str, cores: int) -> None:
    """cpu.cfs_quota_us over cpu.cfs_period_us; -1 means none."""
    _write(cgroup / "cpu" / "job" / "a" / "cpu.cfs_quota_us", quota)
    _write(cgroup / "cpu" / "job" / "a" / "cpu.cfs_period_us", "100000")
    assert count_cores() == cores


def test_a_rank_alone_is_left_to_its_libraries(cgroup: Path) -> None:
    """They see all cores, as under torchrun; not what a container leaves of them."""
    assert (share_cores(1), share_cores(3), share_cores(16)) == (None, 2, 1)
    _write(cgroup / "job" / "a" / "cpu.max", "400000 100000")
    assert (share_cores(1), share_cores(2)) == (4, 2)


def test_cores_without_affinity(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS and Windows tell a number only."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert count_cores() == 4
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert count_cores() == 1


def test_own_cgroups_of_this_host() -> None:
    """Whatever this host has is read without an error."""
    assert all(path.startswith("/") for path in host.own_cgroups().values())


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with four GPUs."""
    folder = tmp_path / "gpus"
    for number in range(4):
        (folder / f"0000:0{number}:00.0").mkdir(parents=True)
    device = tmp_path / "nvidiactl"
    device.touch()
    real, moved = Path, {"/proc/driver/nvidia/gpus": folder, "/dev/nvidiactl": device}
    monkeypatch.setattr(host, "Path", lambda path: moved.get(str(path)) or real(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def test_all_gpus(gpus: Path) -> None:
    """Without CUDA_VISIBLE_DEVICES all are seen."""
    assert count_gpus() == 4


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1", 2),
        ("3", 1),
        (" 0 , 2 ", 2),
        ("0,1,2,3", 4),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,,1", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", 2),
        ("MIG-GPU-8932f937/1/0", 1),
        ("NoDevFiles", 0),
        ("7", 0),
        ("0,7,1", 1),
    ],
)
def test_gpus_by_cuda_visible_devices(gpus: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    """Numbers, UUIDs and MIG names are counted up to the first entry that names no device, as CUDA does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_no_gpus(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without the driver has none, whatever the variable says."""
    for folder in gpus.iterdir():
        folder.rmdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert count_gpus() == 0
    gpus.rmdir()
    assert count_gpus() == 0


def test_a_container_without_gpus_on_a_host_with_some(gpus: Path) -> None:
    """What the kernel tells of the host's GPUs in /proc, a plain container sees, too; it has none of their devices."""
    (gpus.parent / "nvidiactl").unlink()
    assert count_gpus() == 0


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1", "[::1]", "ip6-localhost"])
def test_names_of_this_host_only(name: str) -> None:
    """These mean another host on every host."""
    assert is_loopback(name)


@pytest.mark.parametrize("name", ["", "node1", "10.0.0.1", "localhost.example.org", "0.0.0.0", "::", "1270.example"])
def test_names_that_may_be_another_host(name: str) -> None:
    """These are not known to be loopback, and no name server is asked."""
    assert not is_loopback(name)


def test_the_holder_of_a_port_is_named() -> None:
    """Who listens is told with pid and command; of a free port nothing is told."""
    with listen_tcp("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert find_port_holder(port).startswith(f"pid {os.getpid()} (")
        with pytest.raises(OSError, match="in use"):
            listen_tcp("127.0.0.1", port)
    assert find_port_holder(port) == ""


def test_a_port_that_is_only_connected_to_has_no_holder() -> None:
    """A client's own port is not listened on."""
    with listen_tcp("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()) as client:
        assert find_port_holder(client.getsockname()[1]) == ""


def test_early_clients_wait_in_the_queue() -> None:
    """A client connects before anybody accepts."""
    with listen_tcp("127.0.0.1", 0) as server, socket.create_connection(server.getsockname(), timeout=2):
        connection, _ = server.accept()
        connection.close()


def test_all_addresses_are_listened_on() -> None:
    """Without a host IPv4 clients are served too, whatever family the socket has."""
    with listen_tcp("", 0) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            pass


def test_a_port_taken_on_ipv4_is_taken() -> None:
    """A port that another holds on IPv4 only is not taken for free."""
    with listen_tcp("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listen_tcp("", taken.getsockname()[1]).close()
