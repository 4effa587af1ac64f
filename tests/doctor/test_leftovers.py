"""The probe of what earlier jobs have left: on told hosts, and on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fake_hosts import add_process, look, make_host
from rankwise.doctor.host import Host
from rankwise.doctor.limits.processes import find_possible_launcher, list_left_over, read_process
from rankwise.doctor.probes import leftovers

if TYPE_CHECKING:
    from pathlib import Path


RANK = "RANK=1 LOCAL_RANK=1 TORCHELASTIC_RUN_ID=none"


def test_leftover_ranks_and_workers(tmp_path: Path) -> None:
    """Ranks, loader workers and children of multiprocessing whose launcher is gone are told, with the command that ends them."""
    add_process(tmp_path, 1, argv="/sbin/init", parent=0, name="systemd", started_s=0)
    add_process(tmp_path, 20, argv="/env/bin/python|train.py", env=RANK)
    add_process(tmp_path, 21, argv="/env/bin/python|train.py", name="pt_data_worker")
    add_process(
        tmp_path,
        22,
        argv="/env/bin/python|-c|from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)",
    )
    (told,) = look(leftovers.PROBE, make_host(tmp_path))
    assert (told.verdict, told.class_id, told.fix) == ("warn", "R5", "kill 20 21 22")
    assert "pid 20 (python train.py) of root, started 2 h ago" in told.what


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        ("/sbin/init", {"argv": "python|train.py", "parent": 7, "env": RANK}), ("/sbin/init", {"argv": "python|train.py", "env": "RANK=0 WORLD_SIZE=2"}),
        ("/sbin/init", {"argv": "python|serve.py", "env": RANK, "group": "/system.slice/serve.service"}),
        ("tini|--|python", {"argv": "python|train.py", "env": RANK, "started_s": 1}), ("/bin/bash", {"argv": "python|train.py", "parent": 7, "env": RANK}),
    ],
    ids=["has its launcher", "in the background", "a service", "the program of a container", "below a shell"],
)  # fmt: skip
def test_what_is_no_leftover(tmp_path: Path, first: str, kept: dict[str, str]) -> None:
    """A rank with its launcher, a job in the background, a service, and the main program of a container are left alone."""
    add_process(tmp_path, 1, argv=first, parent=0, name="first", started_s=0)
    add_process(tmp_path, 7, argv="/env/bin/python|/env/bin/torchrun", parent=3)
    add_process(tmp_path, 20, **kept)  # type: ignore[arg-type]
    assert [one.verdict for one in look(leftovers.PROBE, make_host(tmp_path))] == ["ok"]


LIVE = "RANK=0 TORCHELASTIC_RUN_ID=none MASTER_ADDR=a MASTER_PORT=29500"


@pytest.mark.parametrize(
    ("env", "started_s", "verdict"),
    [(LIVE, 600, "ok"), (LIVE, 400, "warn"), (LIVE.replace("29500", "29501"), 600, "warn"), (LIVE.replace("none", "42"), 600, "warn")],
    ids=["of the living job", "older than its launcher", "of another rendezvous place", "of another job"],
)  # fmt: skip
def test_what_a_rank_of_a_living_job_has_started(tmp_path: Path, env: str, started_s: int, verdict: str) -> None:
    """A daemon that a rank has sent off is spared while the rank's launcher lives; what is of an earlier job at the same place is not."""
    add_process(tmp_path, 1, argv="/sbin/init", parent=0, name="systemd", started_s=0)
    add_process(tmp_path, 7, argv="/env/bin/python|/env/bin/torchrun", parent=3, started_s=500)
    add_process(tmp_path, 20, argv="python|train.py", parent=7, env=LIVE, started_s=510)
    add_process(tmp_path, 30, argv="sleep|40", env=env, name="sleep", started_s=started_s)
    assert [one.verdict for one in look(leftovers.PROBE, make_host(tmp_path))] == [verdict]


def test_children_of_an_orphan_are_no_sign_of_life(tmp_path: Path) -> None:
    """A leftover rank and the workers below it know the same job: they do not vouch for each other."""
    add_process(tmp_path, 1, argv="/sbin/init", parent=0, name="systemd", started_s=0)
    add_process(tmp_path, 20, argv="python|train.py", env=LIVE)
    add_process(tmp_path, 21, argv="python|train.py", parent=20, env=LIVE, name="pt_data_worker")
    (told,) = look(leftovers.PROBE, make_host(tmp_path))
    assert told.what.startswith("1 process of jobs whose launcher is gone: pid 20")


def test_only_what_is_held_is_told(tmp_path: Path) -> None:
    """GPUs, memory and ports are named where a leftover has them, and not where it has none."""
    add_process(tmp_path, 1, argv="/sbin/init", parent=0, name="systemd", started_s=0)
    add_process(tmp_path, 20, argv="python|train.py", env=LIVE)
    (told,) = look(leftovers.PROBE, make_host(tmp_path))
    assert told.why.startswith("no GPU, no port and little memory")
    add_process(tmp_path / "b", 1, argv="/sbin/init", parent=0, name="systemd", started_s=0)
    add_process(tmp_path / "b", 20, argv="python|train.py", env=LIVE, memory_bytes=3 << 30)
    tmp_path /= "b"
    (tmp_path / "proc" / "20" / "fd").mkdir()
    for fd, target in (("3", "/dev/nvidia0"), ("4", "socket:[777]"), ("5", "socket:[778]")):
        (tmp_path / "proc" / "20" / "fd" / fd).symlink_to(target)
    row = "{}: 00000000:{} 00000000:0000 {} 00000000:00000000 00:00000000 00000000 0 0 {} 1"
    listening, connected = row.format(0, "733C", "0A", 777), row.format(1, "A000", "01", 778)
    files = {"/proc/net/tcp": f"  sl  local_address\n   {listening}\n   {connected}\n"}
    (told,) = look(leftovers.PROBE, make_host(tmp_path, files=files))
    assert told.why == "they hold GPUs (`CUDA out of memory`), 3.0 GiB of memory, port 29500 (`address already in use`)"


@pytest.mark.parametrize("first", ["/bin/bash", "/env/bin/python|/env/bin/torchrun", "sh|-c|x"])
def test_process_1_that_may_be_the_launcher(tmp_path: Path, first: str) -> None:
    """Where process 1 may have started a rank itself, it is not called left over, and the host is not called clean."""
    add_process(tmp_path, 1, argv=first, parent=0, name="first", started_s=0)
    add_process(tmp_path, 20, argv="python|train.py", env=RANK)
    (told,) = look(leftovers.PROBE, make_host(tmp_path))
    assert (told.verdict, told.fix) == ("skipped", "")
    assert told.what.startswith("1 process of jobs may be left over")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are adopted otherwise")
def test_the_real_daemon_of_a_living_job() -> None:
    """A process that a real rank has sent off is spared as long as what has started the rank runs, and is left over afterwards."""
    daemon = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    rank = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {daemon!r}], check=True)\nsys.stdin.read()"
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "daemon-test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    job = subprocess.Popen(
        [sys.executable, "-c", rank], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdin is not None
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    try:
        host = Host()
        process = read_process(host, pid)
        assert process is not None
        if process.parent != 1 or find_possible_launcher(host):
            pytest.skip("process 1 of this system does not adopt orphans")
        assert list_left_over(host, [process]) == []
        job.stdin.close()
        job.wait(30)
        assert list_left_over(host, [process]) == [process]
    finally:
        os.kill(pid, signal.SIGKILL)
        job.stdout.close()
        job.stdin.close()
        job.wait(30)


def test_forgotten_files_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of torch and NCCL that nobody has open are told where they are large; those in use, and others' names, are not."""
    monkeypatch.setattr(leftovers, "_MUCH_BYTES", 3 * 65536)
    folder = tmp_path / "dev" / "shm"
    folder.mkdir(parents=True)
    for name in ("torch_99_123_0", "torch_20_456_1", "nccl-Ab12Cd", "nccl-Zz99Xy", "mine.bin"):
        (folder / name).write_bytes(os.urandom(65536))
    add_process(tmp_path, 20, argv="python|train.py", parent=7)
    (tmp_path / "proc" / "20" / "maps").write_text("7f00-7f01 rw-s 00000000 00:18 5   /dev/shm/torch_20_456_1\n")
    (tmp_path / "proc" / "20" / "fd").mkdir()
    (tmp_path / "proc" / "20" / "fd" / "5").symlink_to("/dev/shm/nccl-Zz99Xy")
    assert [one.verdict for one in look(leftovers.PROBE, make_host(tmp_path))] == ["ok"]
    monkeypatch.setattr(leftovers, "_MUCH_BYTES", 2 * 65536)
    (told,) = look(leftovers.PROBE, make_host(tmp_path))
    assert told.what == "2 files in /dev/shm that no process has open, 0 MiB"
    assert told.fix == "rm /dev/shm/nccl-Ab12Cd /dev/shm/torch_99_123_0  # if no other container shares this /dev/shm"
