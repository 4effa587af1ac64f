"""What a folder of checkpoints holds is decided by serials, and changes by one rename, whatever the disk and the clock do."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from faulty_disks import FaultyDisk, fail
from rankwise import checkpoint
from rankwise.base.clock import SystemClock
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint import folder as folders, lock, saving, writing
from rankwise.checkpoint.disk import REAL_DISK, Disk

if TYPE_CHECKING:
    from collections.abc import Iterator


def save(folder: Path, step: int, **options: Any) -> None:
    checkpoint.save(folder, {"weights": torch.full((300,), float(step)), "step": step}, step=step, **options)


def load(folder: Path, **options: Any) -> int:
    """Load a whole state; return its step."""
    state: dict[str, Any] = {"weights": torch.zeros(300), "step": 0}
    step = checkpoint.load(folder, state, **options)
    assert {int(value) for value in state["weights"]} == {state["step"]} == {step}
    return int(step or 0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != lock.LOCK)


# ------------------------------------------------------------------ which is the latest


def test_the_latest_is_what_was_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back makes a smaller step the latest; clocks that jump and times of files have no say in it."""
    times = iter([2e9, 1e9, 0.0, 1.7e9])
    monkeypatch.setattr(SystemClock, "time", lambda _self: next(times))
    for step in (10, 20, 15):
        save(tmp_path, step)
    for path, when in (("step-15", 0), ("step-20", 2**33)):
        os.utime(tmp_path / path, (when, when))
    assert load(tmp_path) == 15
    assert checkpoint.latest(tmp_path) == tmp_path / "step-15"
    assert load(tmp_path, step=20) == 20
    save(tmp_path, 20)
    assert load(tmp_path) == 20
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path)] == [20, 15, 10]


def test_a_step_that_is_saved_again_replaces_the_old(tmp_path: Path) -> None:
    """Of one step there is one checkpoint, the new one, and at no moment none: it comes under another name first."""
    for value in (1, 2, 3):
        checkpoint.save(tmp_path, {"value": value}, step=7)
        state = {"value": 0}
        assert checkpoint.load(tmp_path, state, step=7) == 7
        assert state["value"] == value
        assert len(names(tmp_path)) == 1


def test_steps_of_any_length_sort_by_serial(tmp_path: Path) -> None:
    """The names of the folders are for people: 9, 10 and 100 come in the order of their saving."""
    for step in (9, 100, 10):
        save(tmp_path, step)
    assert [one.path.name for one in checkpoint.list_checkpoints(tmp_path)] == [
        "step-10",
        "step-100",
        "step-9",
    ]


def test_an_empty_or_absent_folder_is_a_beginning(tmp_path: Path) -> None:
    """Where nothing was saved, ``load`` returns None and makes nothing; ``verify`` says that nothing is there."""
    absent = tmp_path / "runs"
    assert checkpoint.load(absent, {}) is None
    assert checkpoint.latest(absent) is None
    assert not absent.exists()
    with pytest.raises(CheckpointError, match="there is no folder"):
        checkpoint.verify(absent)
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 4; it has \[3\]"):
        load(tmp_path, step=4)


def test_one_checkpoint_can_be_meant_itself(tmp_path: Path) -> None:
    """The path of a checkpoint, moved or renamed, loads that one."""
    for step in (1, 2):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step-1", tmp_path / "mine")
    assert load(tmp_path / "step-1") == 1
    assert load(tmp_path / "mine") == 1
    assert checkpoint.verify(tmp_path / "mine") == []


def test_leftovers_are_swept_and_strangers_are_not(tmp_path: Path) -> None:
    """The next save deletes what dead saves left, and nothing else; another host's only if nobody has written there for an hour."""
    save(tmp_path, 1)
    hosts, old = "step-6.tmp-0123abcd0123abcd", "step-8.tmp-0123abcd0123abcd"
    strangers = ["notes", "step-100.tmp-1", "step-5.tmp-xyz", "step-7", "step-7.tmp-bad", hosts]
    for name in (folders.name_temporary(tmp_path, 5).name, old, *strangers):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for path in (tmp_path / old / "file", tmp_path / old, tmp_path / hosts):
        os.utime(path, (time.time() - 7200,) * 2)
    save(tmp_path, 2)
    assert names(tmp_path) == sorted([*strangers, "step-1", "step-2"])


def test_without_locks_leftovers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Where nobody knows whose a half written folder is, it may be another job's that still writes."""
    monkeypatch.setattr(lock, "try_lock_file", lambda _fd: None)
    (tmp_path / "step-5.tmp-0123abcd0123abcd").mkdir()
    save(tmp_path, 1)
    assert names(tmp_path) == ["step-1", "step-5.tmp-0123abcd0123abcd"]
    assert "a file system without locks" in capfd.readouterr().err


# ------------------------------------------------------------------ disks that fail


@pytest.fixture(autouse=True)
def real_disk() -> Iterator[None]:
    yield
    saving.DISK = REAL_DISK


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_an_error_at_every_operation_is_told(tmp_path: Path, number: int) -> None:
    """Whichever operation fails, and all after it: the error names file and cause, nothing is left once the disk works."""
    save(tmp_path, 1)
    saving.DISK = disk = FaultyDisk(0)
    save(tmp_path, 2, keep=checkpoint.Keep(last=1))
    kinds = disk.done
    for at, kind in enumerate(kinds, 1):
        folder = tmp_path / f"runs-{at}"
        saving.DISK = REAL_DISK
        save(folder, 1)
        saving.DISK = FaultyDisk(at, fail(number), when="halfway")
        if at <= kinds.index("rename") + 1:
            with pytest.raises(CheckpointError, match="step 2 was not saved: can't") as caught:
                save(folder, 2, keep=checkpoint.Keep(last=1))
            assert os.strerror(number) in str(caught.value), kind
            assert str(folder) in str(caught.value), kind
            assert not [name for name in names(folder) if ".tmp-" in name], kind
        else:  # the new one is safe; that the old one can't be deleted is a warning
            save(folder, 2, keep=checkpoint.Keep(last=1))
        saving.DISK = REAL_DISK
        assert load(folder) in {1, 2}
        save(folder, 3, keep=checkpoint.Keep(last=1))
        assert names(folder) == ["step-3"], kind


def test_a_disk_that_writes_a_byte_at_a_time(tmp_path: Path) -> None:
    """A write may take less than it was given."""
    saving.DISK = Disk(write=lambda fd, data: os.write(fd, data[: max(1, len(data) // 2)]))
    save(tmp_path, 1)
    assert checkpoint.verify(tmp_path) == []
    assert load(tmp_path) == 1


def test_a_rename_without_effect_is_noticed(tmp_path: Path) -> None:
    """A file system that says that it has renamed, and has not, makes no checkpoint of nothing."""
    save(tmp_path, 1)
    saving.DISK = disk = FaultyDisk(0)
    disk.rename = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="step-2 is missing after its rename"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-1"]


def test_a_rename_whose_answer_was_lost_counts(tmp_path: Path) -> None:
    """NFS asks again when the answer is lost, and is told that the source is gone: the rename has been done."""
    saving.DISK = FaultyDisk(1, fail(errno.ENOENT), when="after", only=("rename",))
    save(tmp_path, 1)
    assert load(tmp_path) == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_folders_that_cant_be_synced_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Some file systems don't know fsync of a folder; each file is still synced, and so is asked for each folder."""
    sync, synced = os.fsync, set[str]()

    def refuse(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced.add("folder" if path.is_dir() else path.suffix)
        if path.is_dir():
            raise OSError(number, os.strerror(number))
        sync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    saving.DISK = Disk(sync=refuse)
    save(tmp_path, 1)
    assert load(tmp_path) == 1
    assert synced >= {"folder", ".safetensors", ".json"}


def test_a_full_disk_is_told_and_survived(tmp_path: Path) -> None:
    """A file system that is really full: the old state loads, nothing is left over, and with space the next save works."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here: that needs root")
    try:
        folder = small / "runs"
        save(folder, 1)
        ballast = small / "ballast"
        free = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize
        ballast.write_bytes(bytes(free - 8192))
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save(folder, 2)
        assert "free some space, or keep fewer checkpoints" in str(caught.value)
        assert names(folder) == ["step-1"]
        assert load(folder) == 1
        ballast.unlink()
        save(folder, 3)
        assert load(folder) == 3
    finally:
        lock.let_go(small / "runs")
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cant_be_written_is_told(tmp_path: Path) -> None:
    """A file where the folder should be is named with the cause."""
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: can't write into .*runs"):
        save(tmp_path / "runs", 1)


def test_an_interrupted_save_does_not_stop_the_next(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a save is raised once, and a last save after it works."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    save(tmp_path, 1)
    for at in range(1, 9):
        saving.DISK = FaultyDisk(at, interrupt, when="halfway")
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
        assert load(tmp_path) in {1, 2}
    saving.DISK = REAL_DISK
    save(tmp_path, 3)
    assert load(tmp_path) == 3
    assert not [name for name in names(tmp_path) if ".tmp-" in name]


def test_a_bug_in_the_writer_is_an_error_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody has thought of is raised too, as an error that says what it was, and leaves nothing behind."""

    def break_down(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(writing, "dump_index", break_down)
    with pytest.raises(CheckpointError, match="step 1 was not saved: ZeroDivisionError: division by zero"):
        save(tmp_path, 1)
    assert names(tmp_path) == []
