"""One job at a time writes into a folder: the second is told who is there, and a dead one holds nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.base.errors import CheckpointError
from rankwise.checkpoint import lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.linux

_HOLD = """
import pathlib, sys
from rankwise.checkpoint import lock
lock.take(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
_FORK = """
import os, pathlib, sys
from rankwise.checkpoint import lock
lock.take(pathlib.Path(sys.argv[1]))
if os.fork() == 0:
    print(lock._held, flush=True)
    sys.stdin.read()
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_job_is_told_who_is_there(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """The error of the second names the folder, and process and host of the first; SIGKILL of the first lets it in."""
    with pytest.raises(CheckpointError, match="another job writes checkpoints into") as caught:
        lock.take(tmp_path)
    assert f"process {holder.pid} on host {os.uname().nodename}" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock.take(tmp_path)
    lock.let_go(tmp_path)


def test_a_lock_file_with_nonsense_in_it_is_told_too(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """What the lock file says is for people: broken, it changes nothing."""
    (tmp_path / lock.LOCK).write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match="another job writes checkpoints into"):
        lock.take(tmp_path)


def test_taking_twice_is_taking_once(tmp_path: Path) -> None:
    """A process that holds a folder takes it again for nothing, by whatever path."""
    assert lock.take(tmp_path)
    assert lock.take(tmp_path / ".." / tmp_path.name)
    assert sum(path == tmp_path.resolve() for path in lock._held) == 1
    lock.let_go(tmp_path)
    lock.let_go(tmp_path)  # letting go of nothing is nothing


def test_a_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    """A DataLoader's worker that outlives its job keeps nobody out."""
    with subprocess.Popen(
        [sys.executable, "-c", _FORK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "{}\n"
        assert process.wait() == -signal.SIGKILL
        assert lock.take(tmp_path)  # the child still lives, and reads from us
        lock.let_go(tmp_path)


def test_a_folder_that_was_made_anew_is_taken_anew(tmp_path: Path) -> None:
    """Who has deleted the folder and goes on holds the new one, not the file that is gone."""
    folder = tmp_path / "runs"
    folder.mkdir()
    assert lock.take(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    assert lock.take(folder)
    command = [sys.executable, "-c", _HOLD, str(folder)]
    second = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert "another job writes checkpoints into" in second.stderr
    lock.let_go(folder)


def test_without_locks_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system knows no locks nothing is held, and nothing is refused."""
    monkeypatch.setattr(lock, "try_lock_file", lambda _fd: None)
    assert lock.take(tmp_path) is False
    assert tmp_path.resolve() not in lock._held
