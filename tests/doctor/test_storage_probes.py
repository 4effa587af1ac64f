"""The probes of disks and of the checkpoint folder: on real folders and file systems, and on told ones that can't be made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clocks import FakeClock
from fake_hosts import look, make_host
from rankwise.doctor.examine import collect_facts, compare_hosts
from rankwise.doctor.host import Host, JobShape
from rankwise.doctor.probes import checkpoint_folder, disk_space
from rankwise.doctor.storage import folder_trial, mounts
from rankwise.doctor.storage.folder_trial import Trial, try_folder
from rankwise.doctor.storage.mounts import Mount, find_absolute, find_existing, find_mount

if TYPE_CHECKING:
    from rankwise.doctor.probe import Fact, Reading

MIB, GIB = 1 << 20, 1 << 30
MOUNTS = """/dev/sda2 / ext4 rw,relatime 0 0
tmpfs /tmp tmpfs rw,nosuid,size=8388608k 0 0
server:/export/home /home nfs4 rw,relatime,vers=4.2,addr=10.0.0.1 0 0
10.0.0.2@o2ib:/scratch /scratch\\040space lustre rw,flock 0 0
/dev/sdb1 /old ext4 ro,relatime 0 0
"""


def look_in_namespace(mount: str, job: str) -> list[dict[str, str]]:
    """Look at both probes of storage where something is mounted at /mnt, for this process only."""
    program = (
        "import json, os, pathlib; os.chdir('/mnt'); from rankwise.doctor import registry; from rankwise.doctor.host import Host, JobShape; host = Host(env={}, job=JobShape("
        f"{job})); print(json.dumps([one.of(p.id).to_json() for p in registry.find('disk-space', 'checkpoint-folder') for one in p.look(host)]))"
    )
    ran = subprocess.run(
        ["unshare", "-m", "bash", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ran.returncode and "ermi" in ran.stderr and "Traceback" not in ran.stderr:
        pytest.skip(f"nothing can be mounted here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, str]] = json.loads(ran.stdout)
    return found


needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount a file system"
)


def test_mounts_are_found(tmp_path: Path) -> None:
    """The innermost file system of a folder counts; blanks in its place are written as numbers; a folder that is not there yet is its parent's."""
    host = make_host(tmp_path, files={"/proc/mounts": MOUNTS, "/home/u/x": "", "/scratch space/x": ""})
    found = {folder: find_mount(host, folder) for folder in ("/etc", "/home/u", "/scratch space", "/homely")}
    assert [(one.kind, one.is_shared) for one in found.values() if one] == [
        ("ext4", False),
        ("nfs4", True),
        ("lustre", True),
        ("ext4", False),
    ]
    assert find_existing(host, "/home/u/new/deep") == "/home/u"
    assert Mount(source="s3fs", point="/b", kind="fuse.s3fs").is_shared
    assert not Mount(source="x", point="/b", kind="fuse.mergerfs").is_shared


def go_to(host: Host, folder: str) -> None:
    """Make a folder the current one of a told host."""
    link = host.path("/proc/self/cwd")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


@pytest.mark.parametrize(
    ("free", "inodes", "verdicts"),
    [
        (100 * GIB, (10**6, 10**6), ["ok"]), (1 * GIB, (10**6, 10**6), ["warn"]), (300 * MIB, None, ["warn"] * 3), (10 * MIB, None, ["fail"] * 3),
        (100 * GIB, (10**6, 100), ["warn"] * 3), (100 * GIB, (10**6, 0), ["fail"] * 3),
    ],
)  # fmt: skip
def test_room_on_the_disks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    inodes: tuple[int, int] | None,
    verdicts: list[str],
) -> None:
    """Bytes and inodes are both looked at, in each folder that the job writes to."""
    monkeypatch.setattr(Host, "usage", lambda *_: (500 * GIB, free))
    monkeypatch.setattr(Host, "count_inodes", lambda *_: inodes)
    host = make_host(
        tmp_path,
        files={"/proc/mounts": MOUNTS, "/tmp/x": "", "/home/me/x": ""},
        job=JobShape(checkpoints=Path("/home/me/ck")),
    )
    go_to(host, "/home/me")
    assert [one.verdict for one in look(disk_space.PROBE, host)] == verdicts


def test_a_small_disk_that_is_empty_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small temporary file system that is all free is as it is meant to be."""
    monkeypatch.setattr(Host, "usage", lambda *_: (256 * MIB, 256 * MIB))
    host = make_host(tmp_path, files={"/tmp/x": "", "/home/me/x": ""})
    go_to(host, "/home/me")
    assert [one.verdict for one in look(disk_space.PROBE, host)] == ["ok"]


def test_a_folder_on_a_disk_that_is_read_only(tmp_path: Path) -> None:
    """Temporary files on a read-only disk are a failure, the current folder on one is none."""
    files = {"/proc/mounts": MOUNTS, "/old/x": ""}
    host = make_host(tmp_path, files=files, env={"TMPDIR": "/old"})
    go_to(host, "/old")
    found = [one for one in look(disk_space.PROBE, host) if one.verdict != "ok"]
    assert [one.what for one in found] == [
        "the temporary folder /old can't be written to: /old (ext4) is mounted read-only"
    ]


def test_the_current_folder_is_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PWD that is out of date is not believed: the folder that a process is really in counts."""
    monkeypatch.chdir(tmp_path)
    (told,) = [one for one in look(disk_space.PROBE, Host(env={"PWD": "/nonexistent/x"})) if one.verdict != "skipped"]
    assert "/nonexistent" not in f"{told.what} {told.fix}"
    assert str(tmp_path) in told.what


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that is in use can be deleted there")
def test_a_current_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted current folder is a failure with its words, in each probe that needs it, and no mistake of the probe."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    host = Host(env={}, job=JobShape(checkpoints=Path("ck")))
    assert look(disk_space.PROBE, host)[0].what == "the current folder has been deleted"
    (told,) = look(checkpoint_folder.PROBE, host)
    assert (told.verdict, told.what) == (
        "fail",
        "ck is relative to the current folder, which has been deleted",
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux'")
def test_checkpoints_among_the_kernels_own_facts() -> None:
    """A folder in /proc can hold no checkpoint, though no disk is full."""
    (told,) = look(checkpoint_folder.PROBE, Host(env={}, job=JobShape(checkpoints=Path("/proc/x"))))
    assert told.verdict == "fail"
    assert told.what.startswith("/proc can't be written to: ")


def test_a_file_system_that_tells_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells no size at all is neither full nor has 0 MiB free: nothing is said of it."""
    monkeypatch.setattr(Host, "usage", lambda *_: (0, 0))
    assert [one.verdict for one in look(disk_space.PROBE, make_host(tmp_path, files={"/tmp/x": ""}))] == ["skipped"]


def test_a_real_folder_can_do_all(tmp_path: Path) -> None:
    """On a real folder everything works, what is missing would be made, and nothing is left there."""
    host = Host(job=JobShape(checkpoints=tmp_path / "new" / "run1"))
    found = look(checkpoint_folder.PROBE, host)
    assert {one.verdict for one in found} <= {
        "ok",
        "warn",
    }  # a test may run on a slow disk, or in a container
    assert list(tmp_path.iterdir()) == []
    assert found[-1].facts["exists"] is False
    trial = try_folder(tmp_path, FakeClock())
    assert (trial.error, trial.rename_error, trial.sync_error, trial.has_locks) == ("", "", "", True)
    assert trial.size_bytes == 64 * MIB
    assert list(tmp_path.iterdir()) == []


def test_no_folder_named_and_a_file_in_its_place(tmp_path: Path) -> None:
    """Without a folder there is nothing to look at; a file in its place is a failure."""
    assert [one.verdict for one in look(checkpoint_folder.PROBE, Host(job=JobShape()))] == ["skipped"]
    (tmp_path / "ck").write_text("")
    assert [one.verdict for one in look(checkpoint_folder.PROBE, Host(job=JobShape(checkpoints=tmp_path / "ck")))] == [
        "fail"
    ]


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://bucket", "hdfs://name:8020/x"])
def test_an_object_store_is_no_folder(tmp_path: Path, address: str) -> None:
    """An address of an object store is skipped by name, and is no folder of the disk of the current one either."""
    host = make_host(tmp_path, job=JobShape(checkpoints=Path(address)))
    go_to(host, "/home/me")
    (told,) = look(checkpoint_folder.PROBE, host)
    assert (told.verdict, told.what, told.why) == ("skipped", f"checkpoints go to {address}", "an object store, not a folder")  # fmt: skip
    assert "checkpoints" not in " ".join(one.what for one in look(disk_space.PROBE, host))


def test_a_file_s_address_is_its_path(tmp_path: Path) -> None:
    """file:///ck is /ck; a relative folder with a colon is a folder."""
    host = make_host(tmp_path)
    go_to(host, "/home/me")
    assert find_absolute(host, Path("file:///ck/a")) == "/ck/a"
    assert find_absolute(host, Path("run:1/ck")) == "/home/me/run:1/ck"


@pytest.mark.parametrize("below", ["", "run1"])
def test_a_link_that_leads_to_nothing(tmp_path: Path, below: str) -> None:
    """No folder can be made at a dangling link, as Python itself says; where it leads to one, all is well."""
    link, place = tmp_path / "ck", tmp_path / "disk"
    link.symlink_to(place)
    with pytest.raises(OSError, match="ck"):
        os.makedirs(link / below, exist_ok=True)  # noqa: PTH103 - what jobs call
    host = Host(job=JobShape(checkpoints=link / below))
    (told,) = look(checkpoint_folder.PROBE, host)
    assert (told.verdict, told.what) == (
        "fail",
        f"{link} is a link to {place}, which can't be used: No such file or directory",
    )
    assert str(link) not in " ".join(one.what for one in look(disk_space.PROBE, host))
    place.mkdir()
    assert "fail" not in [one.verdict for one in look(checkpoint_folder.PROBE, host)]


def test_a_link_whose_target_is_there_in_the_meantime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mounted between two looks is no mistake: the folder is tried as if it had been there from the start."""
    link = tmp_path / "ck"
    link.symlink_to(tmp_path)
    monkeypatch.setattr(mounts, "find_dangling", lambda *_: str(link))
    told = look(checkpoint_folder.PROBE, Host(job=JobShape(checkpoints=link)))
    assert "fail" not in [one.verdict for one in told]
    assert "written at" in told[-1].what


@needs_root
def test_a_folder_that_nobody_else_may_look_into(tmp_path: Path) -> None:
    """Another user's closed folder is a failure with its reason, and no mistake of the probe."""
    found = look_in_namespace(
        "mount -t tmpfs -o mode=755 t /mnt && mkdir -m 700 /mnt/a && mkdir /mnt/a/ck",
        "checkpoints=(registry.find('disk-space', 'checkpoint-folder'), os.seteuid(65534), pathlib.Path('/mnt/a/ck/run'))[-1]",
    )
    (told,) = [one for one in found if one["probe"] == "checkpoint-folder"]
    assert (told["verdict"], told["what"]) == ("fail", "/mnt/a can't be written to: Permission denied")


@needs_root
@pytest.mark.parametrize("below", ["", "/run1"])
def test_a_link_to_where_nobody_else_may_look(below: str) -> None:
    """What is in another user's closed folder may be there: it is told as closed, and not as nothing."""
    found = look_in_namespace(
        "mount -t tmpfs -o mode=755 t /mnt && mkdir -m 700 /mnt/a && mkdir /mnt/a/ck && ln -s /mnt/a/ck /mnt/link",
        f"checkpoints=(registry.find('disk-space', 'checkpoint-folder'), os.seteuid(65534), pathlib.Path('/mnt/link{below}'))[-1]",
    )
    (told,) = [one for one in found if one["probe"] == "checkpoint-folder"]
    assert (told["verdict"], told["what"]) == (
        "fail",
        "/mnt/link is a link to /mnt/a/ck, which can't be used: Permission denied",
    )
    assert told["fix"].startswith("namei -l /mnt/link")
    assert "/mnt/link" not in " ".join(one["what"] for one in found if one["probe"] == "disk-space")


@needs_root
def test_a_real_disk_that_is_full() -> None:
    """On a real file system of 8 MiB both probes say that there is no room."""
    found = look_in_namespace(
        "mount -t tmpfs -o size=8m none /mnt && head -c 7900000 /dev/zero > /mnt/full",
        "checkpoints=pathlib.Path('/mnt')",
    )
    told = [(one["probe"], one["verdict"]) for one in found]
    assert told[0] == ("disk-space", "fail")
    assert told[-1] == ("checkpoint-folder", "fail")
    assert found[-1]["what"] == "/mnt can't be written to: No space left on device"


@needs_root
def test_a_real_disk_that_is_read_only_or_in_memory() -> None:
    """A read-only mount is named by both probes; a folder in memory is doubtful."""
    found = look_in_namespace("mount -t tmpfs -o ro none /mnt", "checkpoints=pathlib.Path('/mnt/ck')")
    bad = [one for one in found if one["verdict"] == "fail"]
    assert [one["probe"] for one in bad] == ["disk-space", "checkpoint-folder"]
    assert bad[1]["what"] == "/mnt can't be written to: Read-only file system"
    memory = look_in_namespace("mount -t tmpfs none /mnt", "checkpoints=pathlib.Path('/mnt')")
    assert "/mnt is in memory (tmpfs)" in [one["what"] for one in memory]


@pytest.mark.parametrize(
    ("trial", "verdict", "says"),
    [
        (Trial(error="Permission denied"), "fail", "Permission denied"), (Trial(bytes_per_s=1e9, rename_error="Invalid cross-device link"), "fail", "can't take its final name"),
        (Trial(bytes_per_s=1e9, sync_error="Invalid argument"), "warn", "can't be flushed"), (Trial(bytes_per_s=1e9, has_locks=False), "warn", "can't be locked"),
        (Trial(bytes_per_s=3e6, size_bytes=8 * MIB), "warn", "takes 3.0 MB/s (8 MiB, flushed)"),
    ],
)  # fmt: skip
def test_what_a_folder_can_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial: Trial, verdict: str, says: str
) -> None:
    """Each thing that a checkpoint needs and the folder lacks is told by itself."""
    monkeypatch.setattr(checkpoint_folder, "try_folder", lambda *_: trial)
    host = make_host(tmp_path, files={"/home/x": "", "/proc/mounts": MOUNTS}, job=JobShape(checkpoints=Path("/home")))
    found = [one for one in look(checkpoint_folder.PROBE, host) if one.verdict != "ok"]
    assert [one.verdict for one in found] == [verdict]
    assert says in found[0].what


def test_writing_ends_in_time(tmp_path: Path) -> None:
    """A slow disk gets one second, not 64 MiB."""

    class Slow(FakeClock):
        def monotonic(self) -> float:
            self.sleep(0.3)
            return super().monotonic()

    trial = try_folder(tmp_path, Slow())
    assert 4 * MIB <= trial.size_bytes <= 16 * MIB
    assert folder_trial._MOST_S == 1.0


def make_cluster(tmp_path: Path, kinds: dict[str, str]) -> list[Host]:
    """Hosts whose /ck is on a file system of some kind; shared ones have one folder."""
    shared = tmp_path / "server"
    shared.mkdir()
    hosts = []
    for name, kind in kinds.items():
        source = "server:/export" if kind == "nfs4" else "/dev/sda1"
        files = {
            "/proc/mounts": f"{source} /ck {kind} rw 0 0\n",
            "/proc/sys/kernel/random/boot_id": f"boot-of-{name}\n",
        }
        host = make_host(tmp_path / name, files=files, job=JobShape(checkpoints=Path("/ck")), name=name)
        if kind == "nfs4":
            (tmp_path / name / "ck").symlink_to(shared)
        else:
            (tmp_path / name / "ck").mkdir()
        hosts.append(host)
    return hosts


def compare(hosts: list[Host]) -> list[Reading]:
    facts: dict[str, dict[str, dict[str, Fact]]] = {}
    for host in hosts:
        readings = [one for one in look(checkpoint_folder.PROBE, host) if one.verdict != "warn"]
        facts[host.name] = collect_facts(readings)
        # A symbolic link takes the place of a mount here, which no /proc/mounts of a test can tell.
        kind = host.read("/proc/mounts").split()[2]
        facts[host.name]["checkpoint-folder"] |= {
            "kind": kind,
            "source": host.read("/proc/mounts").split()[0],
            "is_shared": kind == "nfs4",
        }
    return compare_hosts([checkpoint_folder.PROBE], facts)


def test_a_folder_that_all_hosts_share(tmp_path: Path) -> None:
    """One folder of one server is the same on all hosts, and nothing is said."""
    assert compare(make_cluster(tmp_path, dict.fromkeys("abc", "nfs4"))) == []


def test_a_folder_that_a_program_provides_is_known_by_its_source(tmp_path: Path) -> None:
    """FUSE numbers its folders anew on each host: one bucket is one folder all the same, and two buckets are two."""
    hosts = make_cluster(tmp_path, dict.fromkeys("ab", "fuse.s3fs"))
    facts = {host.name: collect_facts(look(checkpoint_folder.PROBE, host)) for host in hosts}
    assert compare_hosts([checkpoint_folder.PROBE], facts) == []
    facts["b"]["checkpoint-folder"]["source"] = "another-bucket"
    (found,) = compare_hosts([checkpoint_folder.PROBE], facts)
    assert "is not the same folder on all hosts" in found.what


def test_a_folder_that_each_host_has_for_itself(tmp_path: Path) -> None:
    """Local disks under one name are told of all hosts."""
    (told,) = compare(make_cluster(tmp_path, dict.fromkeys("abc", "ext4")))
    assert (told.verdict, told.class_id, told.hosts) == ("warn", "K8", ("a", "b", "c"))


def test_a_mount_that_is_missing_on_one_host(tmp_path: Path) -> None:
    """The host on which the shared file system is not mounted is the one that is named."""
    (told,) = compare(make_cluster(tmp_path, {"a": "nfs4", "b": "nfs4", "c": "ext4"}))
    assert (told.verdict, told.class_id, told.hosts) == ("fail", "K8", ("c",))
    assert (
        "is not shared by all hosts, and local to each of c: nfs4 on server:/export: a, b; ext4 on /dev/sda1: c"
        in told.what
    )


def test_containers_on_one_machine_share_a_folder(tmp_path: Path) -> None:
    """Two hosts that are one machine, and have one folder, are no two disks."""
    hosts = [Host(name=name, job=JobShape(checkpoints=tmp_path)) for name in "ab"]
    facts = {host.name: collect_facts(look(checkpoint_folder.PROBE, host)) for host in hosts}
    assert compare_hosts([checkpoint_folder.PROBE], facts) == []
