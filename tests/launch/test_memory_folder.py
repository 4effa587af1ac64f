"""The folder in the host's memory that a job's ranks keep copies of their state in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankwise.base import host_memory
from rankwise.base.host_memory import name_memory_folder
from rankwise.base.os_calls import try_lock_file
from rankwise.checkpoint.memory import find_memory
from rankwise.launcher import memory_folder
from rankwise.launcher.memory_folder import open_memory_folder
from support import run_rankwise, write_script

pytestmark = pytest.mark.linux


def test_a_restarted_job_goes_on_from_memory(tmp_path: Path) -> None:
    """A rank is killed at step 13: all ranks start again at 13, though the disk has step 10; afterwards the memory is free."""
    write_script(
        tmp_path,
        """
        import os, sys, torch, rankwise
        from pathlib import Path
        from rankwise import checkpoint
        from rankwise.checkpoint.memory import find_memory
        with rankwise.init() as ctx:
            model = torch.nn.Linear(2, 2); state = {"model": model}
            start = checkpoint.load("run", state) or 0
            ctx.print(f"start {start} {find_memory(Path('run')).parent}")
            for step in range(start + 1, 16):
                model.weight.data.fill_(step)
                checkpoint.save("run", state, step=step, memory=step % 10 != 0)
                if step == 13 and start == 0 and ctx.rank == 1: os.kill(os.getpid(), 9)
        """,
    )
    result = run_rankwise(["--nproc-per-node", "2", "--max-restarts", "1", "train.py"], tmp_path)
    assert result.code == 0, result.err
    starts = [line.split() for line in result.out.splitlines()]
    assert [line[1] for line in starts] == ["0", "13"]
    assert starts[0][2] == starts[1][2]
    assert not Path(starts[0][2]).exists()


def test_the_memory_of_a_killed_launcher_is_given_back(tmp_path: Path) -> None:
    """Whoever opens a folder removes those whose owner is dead, and no others."""
    code = "import sys; from pathlib import Path; from rankwise.launcher.memory_folder import open_memory_folder as o; f = o(Path(sys.argv[1])); print(f.path, flush=True); sys.stdin.read()"
    others = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    paths = [Path(other.stdout.readline().strip()) for other in others if other.stdout]
    others[0].send_signal(signal.SIGKILL)
    others[0].communicate()
    (paths[0] / "copy").write_text("x")
    own = open_memory_folder(tmp_path)
    assert own is not None
    assert not paths[0].exists()
    assert paths[1].exists()
    assert own.path.stat().st_mode & 0o077 == 0
    own.drop()
    others[1].communicate("")
    assert {path.name for path in tmp_path.iterdir()} == {paths[1].name}


def test_two_launchers_that_start_at_one_moment_both_get_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that another launcher has swept before it was locked is made again."""
    others: list[memory_folder.MemoryFolder | None] = []

    def lock_late(fd: int) -> bool:
        monkeypatch.undo()
        others.append(open_memory_folder(tmp_path))
        return try_lock_file(fd)

    monkeypatch.setattr(memory_folder, "try_lock_file", lock_late)
    folders = [open_memory_folder(tmp_path), *others]
    paths = {folder.path for folder in folders if folder is not None}
    assert len(paths) == 2
    assert set(tmp_path.iterdir()) == paths


def test_without_such_memory_there_is_no_folder(tmp_path: Path) -> None:
    """A system without /dev/shm, or one that may not be written, is no error."""
    assert open_memory_folder(tmp_path / "absent") is None
    if os.getuid():
        tmp_path.chmod(0o500)
        assert open_memory_folder(tmp_path) is None


def test_only_the_users_own_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may make a folder of the name in /dev/shm, or a link, before a launcher does: their state is not loaded."""
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    name = f"{name_memory_folder(os.getppid())}0"
    own, link = tmp_path / "own", tmp_path / name
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    assert find_memory(Path("run")) is None
    link.unlink()
    link.mkdir(mode=0o700)
    found = find_memory(Path("run"))
    assert found is not None
    assert found.parent == link
    link.chmod(0o755)
    assert find_memory(Path("run")) is None
    link.chmod(0o700)
    if not os.getuid():
        os.chown(link, 12345, 12345)
        assert find_memory(Path("run")) is None


def test_a_launcher_of_another_container_is_not_ours() -> None:
    """Containers that share the host's memory have process numbers of their own: the name tells where they count."""
    own = Path("/proc/self/ns/pid").stat().st_ino
    assert name_memory_folder(7) == f"rankwise-memory-{os.getuid()}-{own}-7-"


def test_a_launcher_may_be_process_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most containers."""
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    (tmp_path / f"{name_memory_folder(1)}0").mkdir(mode=0o700)
    assert find_memory(Path("run")) is not None
