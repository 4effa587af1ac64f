"""The probes of limits, cores and memory: on told hosts, and on real processes where limits can be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from fake_hosts import look, make_host
from rankwise.base.host import find_cpu_quota
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.limits.cgroups import (
    count_oom_kills,
    find_memory_room,
    find_process_room,
)
from rankwise.doctor.limits.processes import is_inside, list_processes, name_command, read_process
from rankwise.doctor.probe import find_worst
from rankwise.doctor.probes import cores, leftovers, limits, memory

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.doctor.probe import Reading

GIB = 1 << 30
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max file size             unlimited            unlimited            bytes
Max data size             unlimited            unlimited            bytes
Max stack size            8388608              unlimited            bytes
Max core file size        0                    unlimited            bytes
Max processes             127456               127456               processes
Max open files            1024                 1048576              files
Max locked memory         8388608              8388608              bytes
Max address space         unlimited            unlimited            bytes
Max nice priority         0                    0
"""
STATUS = "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-15\n"
MEMORY = "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   50000000 kB\nSwapTotal:             0 kB\nSwapFree:              0 kB\n"
V2 = {"/proc/self/cgroup": "0::/job/step\n"}
V1 = {"/proc/self/cgroup": "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:pids:/docker/abc\n0::/\n"}
TOPOLOGY = {
    f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}\n" for cpu in range(16)
}


def look_real(probe: str, *before: str, job: str = "") -> list[dict[str, str]]:
    """Look at this very host by one probe, in a shell that has set something before."""
    program = (
        f"import json; from rankwise.doctor import registry; from rankwise.doctor.host import Host, JobShape; "
        f"print(json.dumps([one.to_json() for one in registry.find({probe!r})[0].look(Host(job=JobShape({job})))]))"
    )
    ran = subprocess.run(
        ["bash", "-c", "; ".join([*before, f"{sys.executable} -c {json.dumps(program)}"])],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: list[dict[str, str]] = json.loads(ran.stdout)
    return found


def words(found: list[Reading]) -> list[tuple[str, str]]:
    return [(one.verdict, one.class_id) for one in found]


def test_this_host_is_healthy() -> None:
    """On the host of the tests, the probes of limits and memory raise no failure."""
    host = Host(job=JobShape(num_ranks=2))
    for probe in (limits.PROBE, cores.PROBE, memory.PROBE, leftovers.PROBE):
        assert find_worst(look(probe, host)) != "fail", probe.id


def test_limits_of_a_plain_shell_are_fine(tmp_path: Path) -> None:
    """The limits that most systems come with raise no alarm, nor does little locked memory without InfiniBand."""
    host = make_host(
        tmp_path,
        files={"/proc/self/limits": LIMITS, "/proc/self/status": STATUS},
        job=JobShape(num_ranks=8, num_workers=4),
    )
    assert words(look(limits.PROBE, host)) == [("ok", "")]


def test_open_files_and_many_workers(tmp_path: Path) -> None:
    """1024 open files are few for ranks with many workers."""
    host = make_host(tmp_path, files={"/proc/self/limits": LIMITS}, job=JobShape(num_workers=16))
    (told,) = look(limits.PROBE, host)
    assert (told.verdict, told.fix) == ("warn", "ulimit -Sn 65536")


@pytest.mark.parametrize(
    ("hard", "fix"),
    [
        ("1073741816", "ulimit -Sn 65536"),
        ("unlimited", "ulimit -Sn 65536"),
        ("4096", 'ulimit -n "$(ulimit -Hn)"'),
    ],
)
def test_open_files_are_not_raised_without_measure(tmp_path: Path, hard: str, fix: str) -> None:
    """Programs that close all files that may be open are busy for minutes with a limit of a billion."""
    files = {"/proc/self/limits": LIMITS.replace("1024                 1048576 ", f"256                  {hard:<20} ")}
    (told,) = look(limits.PROBE, make_host(tmp_path, files=files))
    assert told.fix == fix


def test_a_hard_limit_is_raised_where_it_is_set(tmp_path: Path) -> None:
    """Where the hard limit is too low, too, no `ulimit -Hn` is proposed, which would set the same again: the places that may set it are told."""
    low = LIMITS.replace("1024                 1048576 ", "256                  256     ")
    (told,) = look(limits.PROBE, make_host(tmp_path, files={"/proc/self/limits": low, "/proc/self/status": STATUS}))
    assert told.what == "a process may open 256 files"
    assert told.fix.startswith("# ulimit -n can't go beyond the hard limit. It is raised where it is set: nofile in /etc/security/limits.conf, LimitNOFILE= of the service")  # fmt: skip


@pytest.mark.parametrize(
    ("users", "says"),
    [
        ({}, "ulimit -n 65536  # root"),
        ({"/proc/self/uid_map": "         0          0 4294967295\n"}, "ulimit -n 65536  # root"),
        ({"/proc/self/uid_map": "         0       1000          1\n"}, "# ulimit -n can't go beyond the hard limit"),
    ],
    ids=["root", "root of all users", "root of a user namespace"],
)
def test_root_may_go_beyond_a_hard_limit(tmp_path: Path, users: dict[str, str], says: str) -> None:
    """With CAP_SYS_RESOURCE the shell raises it, and nothing else is told; root of a user namespace has it in name only."""
    low = LIMITS.replace("1024                 1048576 ", "256                  256     ").replace("Max file size             unlimited            unlimited ", "Max file size             1048576              1048576   ")  # fmt: skip
    status = STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t0000000001000000")
    told = look(
        limits.PROBE, make_host(tmp_path, files={"/proc/self/limits": low, "/proc/self/status": status, **users})
    )
    assert [one.what for one in told] == ["a process may open 256 files", "a process may write files of 1 MiB"]
    assert told[0].fix.startswith(says)
    assert told[1].fix.startswith(says.replace("-n", "-f").replace("65536", "unlimited"))


@pytest.mark.parametrize(
    ("name", "soft", "hard", "fix"),
    [
        ("Max processes", "20", "4096", 'ulimit -u "$(ulimit -Hu)"'),
        ("Max processes", "20", "25", "# ulimit -u can't go beyond the hard limit. It is raised where it is set: nproc in"),
        ("Max address space", "8589934592", "unlimited", "ulimit -v unlimited"),
        ("Max address space", "8589934592", "8589934592", "# ulimit -v can't go beyond the hard limit"),
        ("Max file size", "1048576", "unlimited", "ulimit -f unlimited"),
        ("Max cpu time", "600", "unlimited", "# on a login node: start the job through the batch system; elsewhere:\nulimit -t unlimited"),
        ("Max cpu time", "600", "900", "# on a login node: start the job through the batch system; elsewhere:\n# ulimit -t can't"),
    ],
)  # fmt: skip
def test_other_limits_and_their_hard_ones(tmp_path: Path, name: str, soft: str, hard: str, fix: str) -> None:
    """Each limit is raised in the shell if the hard one allows what is needed, and else where that was set."""
    lines = [f"{name:<25} {soft:<20} {hard:<20} x" if line.startswith(name) else line for line in LIMITS.splitlines()]  # fmt: skip
    files = {"/proc/self/limits": "\n".join(lines), "/proc/self/status": STATUS}
    (told,) = look(limits.PROBE, make_host(tmp_path, files=files))
    assert told.verdict == "warn"
    assert told.fix.startswith(fix)


@pytest.mark.skipif(sys.platform != "linux", reason="limits are read from /proc")
def test_the_real_soft_limit_is_raised_by_the_printed_command() -> None:
    """The command, pasted into the very shell: the warning is gone."""
    (told,) = look_real("limits", "ulimit -Sn 256")
    assert told["verdict"] == "warn"
    (told,) = look_real("limits", "ulimit -Sn 256", told["fix"])
    assert told["verdict"] == "ok"


@pytest.mark.parametrize(
    ("backend", "nodes", "verdict"),
    [("nccl", 2, "fail"), ("nccl", 1, "warn"), ("", 2, "warn"), ("gloo", 2, "ok")],
)
def test_locked_memory_with_infiniband(tmp_path: Path, backend: str, nodes: int, verdict: str) -> None:
    """Little locked memory breaks NCCL on a host with InfiniBand, unless the process may lock what it likes."""
    files = {"/proc/self/limits": LIMITS, "/proc/self/status": STATUS, "/dev/infiniband/uverbs0": ""}
    host = make_host(tmp_path / "a", files=files, job=JobShape(backend=backend, num_nodes=nodes))
    assert [one.verdict for one in look(limits.PROBE, host)] == [verdict]
    may = files | {"/proc/self/status": STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t000001ffffffffff")}
    assert [
        one.verdict
        for one in look(
            limits.PROBE, make_host(tmp_path / "b", files=may, job=JobShape(backend=backend, num_nodes=nodes))
        )
    ] == ["ok"]
    inside = may | {"/proc/self/uid_map": "0 100000 65536\n"}
    host = make_host(tmp_path / "c", files=inside, job=JobShape(backend=backend, num_nodes=nodes))
    assert [one.verdict for one in look(limits.PROBE, host)] == [verdict]


@pytest.mark.skipif(sys.platform != "linux", reason="limits are read from /proc")
def test_root_of_a_real_user_namespace_is_held_to_the_hard_limit() -> None:
    """`ulimit -n` beyond it is refused there, and is not what is proposed."""
    script = 'ulimit -n 256; ulimit -n 257 2>&1; exec "$0" -c "$1"'
    program = (
        "from rankwise.doctor.host import Host; from rankwise.doctor.probes.limits import PROBE; "
        "print([one.fix for one in PROBE.look(Host(env={})) if 'open 256' in one.what])"
    )
    ran = subprocess.run(
        ["unshare", "-r", "bash", "-c", script, sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    if ran.returncode and "ermi" in ran.stderr:
        pytest.skip(f"no user namespace can be made here: {ran.stderr.strip()}")
    assert "not permitted" in ran.stdout
    assert "ulimit -n 65536  # root" not in ran.stdout
    assert "open files" in ran.stdout.splitlines()[0]
    assert "nofile" in ran.stdout.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="limits are read from /proc")
def test_real_limits_are_told() -> None:
    """A shell with few open files, little processor time and small files is told so, each with its command."""
    found = look_real("limits", "ulimit -n 256", "ulimit -t 600", "ulimit -f 20480")
    assert [one["verdict"] for one in found] == ["warn"] * 3
    assert found[0]["what"] == "a process may open 256 files"
    assert found[1]["what"].startswith("a process may use 10 min of processor time")
    assert found[2]["what"] == "a process may write files of 20 MiB"


@pytest.mark.parametrize(("used", "verdict"), [("100", "ok"), ("800", "warn"), ("1000", "fail")])
def test_a_container_that_allows_few_processes(tmp_path: Path, used: str, verdict: str) -> None:
    """What the group of processes leaves is held against what the ranks take."""
    files = V2 | {
        "/proc/self/limits": LIMITS,
        "/sys/fs/cgroup/job/step/pids.max": "max",
        "/sys/fs/cgroup/job/pids.max": "1024",
        "/sys/fs/cgroup/job/pids.current": used,
    }
    host = make_host(tmp_path, files=files, job=JobShape(num_ranks=8))
    assert find_process_room(host) == (1024, 1024 - int(used))
    assert [one.verdict for one in look(limits.PROBE, host)] == [verdict]


def make_cores(
    root: Path, job: JobShape, env: dict[str, str] | None = None, files: dict[str, str] | None = None
) -> Host:
    """A host with 8 cores of two threads each."""
    return make_host(root, files={"/proc/self/status": STATUS, **TOPOLOGY, **(files or {})}, job=job, env=env)


@pytest.mark.parametrize(
    ("job", "env", "verdicts"),
    [
        (JobShape(), {}, ["ok"]), (JobShape(num_ranks=8), {}, ["ok"]), (JobShape(num_ranks=17), {}, ["warn"]),
        (JobShape(num_ranks=8), {"OMP_NUM_THREADS": "2"}, ["ok"]), (JobShape(num_ranks=8), {"OMP_NUM_THREADS": "16"}, ["warn"]),
        (JobShape(num_ranks=2, backend="gloo"), {"OMP_NUM_THREADS": "1"}, ["warn"]), (JobShape(num_ranks=2, backend="nccl"), {"OMP_NUM_THREADS": "1"}, ["ok"]),
        (JobShape(num_ranks=4, num_workers=4), {}, ["ok"]), (JobShape(num_ranks=4, num_workers=8), {}, ["warn"]),
    ],
)  # fmt: skip
def test_cores_against_the_job(tmp_path: Path, job: JobShape, env: dict[str, str], verdicts: list[str]) -> None:
    """Ranks, their threads and their workers are held against the 16 processors of 8 cores."""
    found = look(cores.PROBE, make_cores(tmp_path, job, env))
    assert [one.verdict for one in found] == verdicts
    assert {one.class_id for one in found} <= {"", "X17"}


ONLINE = {"/sys/devices/system/cpu/online": "0-15\n"}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "1",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (SLURM, "srun starts 4 ranks here without OMP_NUM_THREADS"), (MPI, "mpirun starts 4 ranks here"), (SLURM | BY_HAND, "srun starts 4 ranks here"),
        (SLURM | {"OMP_NUM_THREADS": "2"}, ""), (SLURM | BY_HAND | {"TORCHELASTIC_RUN_ID": "none"}, ""), (BY_HAND, ""), ({}, ""),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "0"}, ""),
    ],
    ids=["srun", "mpirun", "srun, and RANK by hand", "threads are set", "torchrun", "a process by hand", "nobody", "one task that starts the ranks"],
)  # fmt: skip
def test_ranks_without_a_number_of_threads(tmp_path: Path, env: dict[str, str], says: str) -> None:
    """Ranks that srun or mpirun starts take all cores each unless the number is set; torchrun and rankwise set it."""
    host = make_cores(tmp_path, JobShape(num_ranks=4), env, ONLINE)
    (told,) = look(cores.PROBE, host)
    assert told.verdict == ("warn" if says else "ok")
    assert says in told.what
    assert told.fix == ("export OMP_NUM_THREADS=2" if says else "")


def test_a_task_that_is_bound_to_its_own_cores(tmp_path: Path) -> None:
    """Where srun gives each of four tasks its own four processors, what one sees is enough for it, and none gets in another's way."""
    status = STATUS.replace("0-15", "4-7")
    (told,) = look(
        cores.PROBE,
        make_cores(tmp_path / "a", JobShape(num_ranks=4), SLURM, {**ONLINE, "/proc/self/status": status}),
    )
    assert told.verdict == "ok"
    one = {**ONLINE, "/proc/self/status": STATUS.replace("0-15", "3")}
    (told,) = look(cores.PROBE, make_cores(tmp_path / "b", JobShape(num_ranks=4), SLURM, one))
    assert (told.verdict, told.what) == ("ok", "1 core (1 processor)")


def test_a_quota_below_the_cores(tmp_path: Path) -> None:
    """A container with two processors' worth of time has two, whatever it sees; one that is often stopped is told."""
    files = V2 | {
        "/sys/fs/cgroup/job/cpu.max": "200000 100000",
        "/sys/fs/cgroup/job/cpu.stat": "usage_usec 1\nnr_periods 1000\nnr_throttled 600\nthrottled_usec 5\n",
        "/sys/fs/cgroup/job/step/cpu.max": "max 100000",
    }
    host = make_cores(tmp_path, JobShape(num_ranks=4), files=files)
    assert find_cpu_quota(host.root) == 2.0
    ranks, stopped = look(cores.PROBE, host)
    assert ranks.what == "4 ranks, and 2 processors can be used here (quota 2)"
    assert "600 of 1000 periods (60%)" in stopped.what


def test_groups_of_version_1_in_a_container(tmp_path: Path) -> None:
    """In a container the group's path is that of the host outside; its limits stand at the root that is seen."""
    root = "/sys/fs/cgroup"
    files = V1 | {
        f"{root}/cpu/cpu.cfs_quota_us": "150000", f"{root}/cpu/cpu.cfs_period_us": "100000", f"{root}/memory/memory.limit_in_bytes": str(4 * GIB),
        f"{root}/memory/memory.usage_in_bytes": str(3 * GIB), f"{root}/memory/memory.stat": f"total_inactive_file {GIB}\n",
        f"{root}/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }  # fmt: skip
    host = make_host(tmp_path, files=files)
    assert find_cpu_quota(host.root) == 1.5
    assert find_memory_room(host) == (4 * GIB, 2 * GIB)
    assert count_oom_kills(host) == 2


def test_kills_of_the_whole_host_are_not_ours(tmp_path: Path) -> None:
    """What was killed anywhere on the host says nothing of this session."""
    files = {"/proc/self/cgroup": "9:memory:/\n", "/sys/fs/cgroup/memory/memory.oom_control": "oom_kill 7\n"}
    assert count_oom_kills(make_host(tmp_path, files=files)) == 0


def test_memory_that_is_left(tmp_path: Path) -> None:
    """The lesser of host and container counts, and is held against the ranks; cache that can be given back is free."""
    files = V2 | {
        "/proc/meminfo": MEMORY,
        "/sys/fs/cgroup/job/memory.max": str(8 * GIB),
        "/sys/fs/cgroup/job/memory.current": str(7 * GIB),
        "/sys/fs/cgroup/job/memory.stat": f"inactive_file {GIB}\n",
    }
    fine = look(memory.PROBE, make_host(tmp_path / "a", files=files, job=JobShape(num_ranks=4)))
    assert words(fine) == [("ok", "")]
    assert fine[0].what == "2.0 GiB of 8.0 GiB of memory are free (the limit of this container or session is 8.0 GiB)"
    assert words(look(memory.PROBE, make_host(tmp_path / "b", files=files, job=JobShape(num_ranks=8)))) == [
        ("fail", "R3")
    ]


@pytest.mark.parametrize(
    ("files", "env", "fix"),
    [
        ({}, {}, "# fewer ranks or workers, or more memory: sbatch --mem=…, docker run"), ({"/sys/fs/cgroup/job/memory.max": str(8 * GIB)}, {}, "ps aux"),
        ({"/sys/fs/cgroup/job/memory.max": "max", "/proc/meminfo": "MemTotal: 400000 kB\nMemAvailable: 300000 kB\n"}, {}, "# fewer ranks, or a host"),
    ],
    ids=["limited", "others have it", "host"],
)  # fmt: skip
def test_a_limit_of_memory_that_is_too_small_by_itself(
    tmp_path: Path, files: dict[str, str], env: dict[str, str], fix: str
) -> None:
    """Where nobody has the memory, nobody is looked for: the limit is to be raised where it was set."""
    files = V2 | {
        "/proc/meminfo": MEMORY,
        "/sys/fs/cgroup/job/memory.max": str(700 << 20),
        "/sys/fs/cgroup/job/memory.current": str(8 * GIB if "ps" in fix else 30 << 20),
        **files,
    }
    (told,) = look(memory.PROBE, make_host(tmp_path, files=files, env=env, job=JobShape(num_ranks=4)))
    assert told.verdict == "fail"
    assert told.fix.startswith(fix)


def test_a_small_limit_on_a_host_that_is_nearly_full(tmp_path: Path) -> None:
    """What is told as free is the host's, of the host's; and the limit, too small by itself, is raised where it was set."""
    files = V2 | {
        "/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 307200 kB\n",
        "/sys/fs/cgroup/job/memory.max": str(700 << 20),
        "/sys/fs/cgroup/job/memory.current": "0",
        "/.dockerenv": "",
    }
    (told,) = look(memory.PROBE, make_host(tmp_path, files=files, job=JobShape(num_ranks=4)))
    assert told.what.startswith(
        "300 MiB of 62.5 GiB of memory are free (the limit of this container or session is 700 MiB); 4 ranks take"
    )
    assert told.fix.startswith("# fewer ranks or workers, or more memory: ")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"/sys/fs/cgroup/job/step/memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n"}, "has killed 2 processes"),
        ({"/sys/fs/cgroup/job/step/memory.events": "oom_kill 1\n"}, "has killed 1 process of"),
        ({"/proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 3000000 kB\nSwapTotal: 8388608 kB\nSwapFree: 2097152 kB\n"}, "6.0 GiB have gone to swap"),
        ({"/proc/sys/vm/overcommit_memory": "2\n", "/proc/meminfo": MEMORY + "CommitLimit:    34000000 kB\nCommitted_AS:   33000000 kB\n"}, "977 MiB can still be committed"),
    ],
)  # fmt: skip
def test_memory_that_was_short(tmp_path: Path, files: dict[str, str], says: str) -> None:
    """Kills, swap and strict promises are told, each by its numbers."""
    (told,) = look(memory.PROBE, make_host(tmp_path, files={**V2, "/proc/meminfo": MEMORY, **files}))
    assert told.verdict == "warn"
    assert says in told.what


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["/usr/bin/python3", "-u", "-W", "ignore", "/home/u/train.py", "--token", "s3cret"], "python3 train.py"), (["python", "-m", "pkg.train", "--key=k"], "python -m pkg.train"),
        (["python", "-c", "import secret"], "python -c …"), (["/usr/lib/xorg/Xorg", ":0"], "Xorg"), (["postgres: user password host"], "postgres:"), ([], ""),
    ],
)  # fmt: skip
def test_commands_are_named_without_arguments(argv: list[str], told: str) -> None:
    """Of a command line only program and script are shown: the rest may hold secrets."""
    assert name_command(argv) == told


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_real_processes_are_read() -> None:
    """This process is found with its parent, user and name, and counts as inside of its parent."""
    host = Host()
    own = read_process(host, os.getpid())
    assert own is not None
    assert (own.parent, own.user) == (os.getppid(), psutil.Process().username())
    assert own.command.startswith("python")
    assert is_inside(host, os.getpid(), os.getppid())
    assert not is_inside(host, os.getppid(), os.getpid())
    assert os.getpid() in {one.pid for one in list_processes(host)}
