"""The probe of /dev/shm: told sizes, real files, and real mounts where root may make them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fake_hosts import look, make_host
from rankwise.doctor.host import Host
from rankwise.doctor.probes import shared_memory

if TYPE_CHECKING:
    from pathlib import Path

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount a file system"
)


@pytest.mark.parametrize(
    ("size", "free", "verdict"),
    [
        (64 << 20, 64 << 20, "warn"),
        (64 << 20, 1 << 20, "fail"),
        (16 << 30, 1 << 20, "fail"),
        (512 << 20, 400 << 20, "warn"),
        (16 << 30, 8 << 30, "ok"),
        (0, 0, "ok"),
    ],
)
def test_room_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, free: int, verdict: str
) -> None:
    """Docker's 64 MiB are a warning while they are free, and a failure when they are full; a file system without a limit tells no size."""
    monkeypatch.setattr(Host, "usage", lambda *_: (size, free))
    (told,) = look(shared_memory.PROBE, make_host(tmp_path))
    assert told.verdict == verdict


def test_a_full_one_is_looked_at_before_it_is_enlarged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm is not taken for a small one, unless it is tiny: how its files are listed stands before more space, and pasting the whole removes nothing."""
    for size, first in ((200 << 20, "du -ah /dev/shm"), (100 << 20, "sudo mount -o remount")):
        monkeypatch.setattr(Host, "usage", lambda *_, size=size: (size, 1 << 20))
        (found,) = look(shared_memory.PROBE, make_host(tmp_path))
        assert (found.verdict, found.class_id) == ("fail", "X16")
        assert found.fix.startswith(first)
        assert "rm " not in found.fix


@pytest.mark.parametrize(
    ("files", "env", "fix"),
    [
        ({}, {}, "sudo mount -o remount,size=16g /dev/shm"), ({}, {"SLURM_JOB_ID": "7"}, "sudo mount -o remount,size=16g /dev/shm"),
        ({"/.dockerenv": ""}, {}, "docker run --shm-size=16g …"), ({"/run/.containerenv": ""}, {}, "docker run --shm-size=16g …"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "# a volume at /dev/shm in the pod's spec: emptyDir: {medium: Memory"),
        ({"/.singularity.d/actions/run": ""}, {}, "docker run --shm-size"), ({}, {"APPTAINER_CONTAINER": "/x.sif"}, "docker run --shm-size"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("free", [64 << 20, 1 << 20])
def test_more_shared_memory_by_where_it_is_small(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    files: dict[str, str],
    env: dict[str, str],
    fix: str,
) -> None:
    """Docker's 64 MiB are too little full or not; a plain host knows no `docker run`."""
    monkeypatch.setattr(Host, "usage", lambda *_: (64 << 20, free))
    (told,) = look(shared_memory.PROBE, make_host(tmp_path, files=files, env=env))
    assert told.fix.startswith(fix)


def _tell_memory(gib: float) -> str:
    return f"MemTotal: {int(gib * (1 << 20))} kB\n"


_GROUP = {
    "/proc/self/cgroup": "0::/job\n",
    "/sys/fs/cgroup/job/memory.max": str(2 << 30),
    "/sys/fs/cgroup/job/memory.current": "0",
}


@pytest.mark.parametrize(
    ("size", "free", "files", "verdict", "fix"),
    [
        (490, 400, {"/proc/meminfo": _tell_memory(0.96)}, "ok", ""), (490, 1, {"/proc/meminfo": _tell_memory(0.96)}, "fail", "du -ah"),
        (64, 64, {"/proc/meminfo": _tell_memory(1)}, "warn", "sudo mount -o remount,size=512m /dev/shm"),
        (64, 64, {"/proc/meminfo": _tell_memory(7), "/.dockerenv": ""}, "warn", "docker run --shm-size=3g …"),
        (64, 64, {"/proc/meminfo": _tell_memory(500), "/.dockerenv": "", **_GROUP}, "warn", "docker run --shm-size=1g …"),
        (64, 64, {"/proc/meminfo": _tell_memory(1), "/var/run/secrets/kubernetes.io/x": ""}, "warn", "# a volume at /dev/shm in the pod's spec: emptyDir: {medium: Memory, sizeLimit: 512Mi}"),
        (500, 400, {"/proc/meminfo": _tell_memory(500)}, "warn", "sudo mount -o remount,size=16g /dev/shm"),
    ],
    ids=["a small host as it comes", "full", "small", "container", "container with a limit", "pod", "large"],
)  # fmt: skip
def test_no_more_shared_memory_than_there_is_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    free: int,
    files: dict[str, str],
    verdict: str,
    fix: str,
) -> None:
    """At most half of the memory is proposed; a small host that gives that already is as it should be."""
    monkeypatch.setattr(Host, "usage", lambda *_: (size << 20, free << 20))
    (told,) = look(shared_memory.PROBE, make_host(tmp_path, files=files))
    assert told.verdict == verdict
    assert told.fix.removeprefix("sudo ").startswith(fix.removeprefix("sudo "))
    assert ("size" in told.fix) == (verdict == "warn")


def test_a_closed_one_in_a_container_is_opened_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of Apptainer's containers nobody is root: a remark says where the command is to be typed."""
    monkeypatch.setattr(Host, "usage", lambda *_: (16 << 30, 8 << 30))
    monkeypatch.setattr(Host, "may_write", lambda *_: False)
    files = {"/dev/shm/x": "", "/.singularity.d/runscript": ""}
    (told,) = look(shared_memory.PROBE, make_host(tmp_path, files=files))
    assert told.verdict == "fail"
    assert told.fix.startswith("sudo chmod 1777 /dev/shm  # on the host, for Apptainer")


def test_rights_are_asked_in_the_way_that_old_runtimes_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer call by effective ids, which they refuse, is made only where those are not the real ones."""
    asked: list[bool] = []

    def access(_path: object, _mode: int, *, effective_ids: bool = False) -> bool:
        asked.append(effective_ids)
        return True

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(os, "supports_effective_ids", {access})
    assert make_host(tmp_path).may_write("/")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert make_host(tmp_path).may_write("/")
    assert asked == [False, True]


def test_a_sound_one_costs_a_launcher_no_imports(tmp_path: Path) -> None:
    """It is asked before each start: what only a bad one needs is not imported."""
    program = (
        "import sys; from rankwise.doctor.host import Host; Host.usage = lambda *_: (16 << 30, 8 << 30); Host.may_write = lambda *_: True; "
        "from rankwise.doctor.probes.shared_memory import PROBE; print([one.verdict for one in PROBE.look(Host(env={}))], "
        "[name for name in sys.modules if name.startswith('rankwise.doctor.limits.')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "['ok'] []"


def _look_at_mount(mount: str, *, uid: int = 0) -> list[dict[str, str]]:
    # All that it imports late is there before the user changes: who that is may not look into the folder of the sources.
    program = (
        "import json, os; import rankwise.doctor.limits.ulimits, rankwise.doctor.limits.cgroups; from rankwise.doctor.probes.shared_memory import PROBE; from rankwise.doctor.host import Host; "
        f"os.seteuid({uid}); "
        "print(json.dumps([one.to_json() for one in PROBE.look(Host(env={}))]))"
    )
    ran = subprocess.run(
        ["unshare", "-m", "bash", "-c", f'{mount} "$0" -c "$1"', sys.executable, program], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    if ran.returncode and "ermi" in ran.stderr and "Traceback" not in ran.stderr:
        pytest.skip(f"nothing can be mounted here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, str]] = json.loads(ran.stdout)
    return found


@needs_root
def test_real_shared_memory_that_nobody_can_write_to() -> None:
    """A read-only /dev/shm and one without rights are failures; one with room for all is none."""
    (told,) = _look_at_mount("mount -t tmpfs -o ro,size=2g t /dev/shm &&")
    assert (told["verdict"], told["what"]) == ("fail", "/dev/shm is mounted read-only")
    assert told["fix"].startswith("sudo mount -o remount,rw /dev/shm")
    (told,) = _look_at_mount("mount -t tmpfs -o size=2g,mode=1777 t /dev/shm &&")
    assert told["verdict"] == "ok"


@needs_root
def test_real_shared_memory_that_another_user_can_not_write_to() -> None:
    """By the rights of who asks: root may where another user may not."""
    mount = "mount -t tmpfs -o size=2g,mode=755 t /dev/shm &&"
    (told,) = _look_at_mount(mount)
    assert told["verdict"] == "ok"
    (told,) = _look_at_mount(mount, uid=65534)
    assert (told["verdict"], told["what"]) == ("fail", "/dev/shm can't be written to by your user")
    assert told["fix"].startswith("sudo chmod 1777 /dev/shm")
