"""A resident server's memory of its files: each way in which something that decides what a Python loads can change is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import TYPE_CHECKING

import pytest

from rankwise.launcher.process_facts import read_process_facts, read_tracer
from rankwise.warm import loaded_modules
from rankwise.warm.checks import list_importable
from rankwise.warm.loaded_modules import Loaded
from rankwise.warm.resident import Resident

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.linux


def _replace_in_place(path: Path) -> None:
    """Write other bytes, as many as before, and give the file its old time, as `rsync -t` does."""
    before = path.stat()
    path.write_bytes(b"#" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


_CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a loaded module, with its old time and size": (lambda at: _replace_in_place(at / "user/mine.py"), "user/mine.py"),
    "a loaded module that is gone": (lambda at: (at / "user/mine.py").unlink(), "user/mine.py"),
    "a .pth file, in place": (lambda at: (at / "site-packages/one.pth").write_text("/other"), "site-packages/one.pth"),
    "a package that was installed": (lambda at: (at / "site-packages/new").mkdir(), "site-packages"),
    "the first package of the user's own": (lambda at: (at / "home/new").mkdir(parents=True), "home"),
    "a sitecustomize beside the library": (lambda at: (at / "lib/sitecustomize.py").touch(), "lib/sitecustomize.py"),
    "a sitecustomize in PYTHONPATH": (lambda at: (at / "user/sitecustomize.py").touch(), "user/sitecustomize.py"),
    "a module in PYTHONPATH that hides a loaded one": (lambda at: (at / "user/json.py").touch(), "user"),
    "nothing: bytecode": (lambda at: (at / "site-packages/__pycache__").mkdir(), ""),
    "nothing: a module in PYTHONPATH that hides none": (lambda at: (at / "user/another.py").touch(), ""),
    "nothing: a folder that was touched": (lambda at: os.utime(at / "site-packages"), ""),
}  # fmt: skip


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Give the memory of a Python whose folders lie in ours, and whose files are an hour old."""
    for name in ("user", "lib", "site-packages"):
        (tmp_path / name).mkdir()
    mine = types.ModuleType("mine")
    mine.__file__ = str(tmp_path / "user" / "mine.py")
    for path in (tmp_path / "user" / "mine.py", tmp_path / "site-packages" / "one.pth"):
        path.write_text("/folder")
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "user"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "user"), str(tmp_path / "lib")])
    folders = [str(tmp_path / "site-packages"), str(tmp_path / "home")]
    monkeypatch.setattr(loaded_modules, "_list_site_folders", lambda: folders)
    made = Loaded(list_importable)
    made.note_all([mine])
    assert made.find_changed() == ""
    return made


@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_is_seen_that_another_start_would_see(noted: Loaded, what: str, tmp_path: Path) -> None:
    """An edit, an install, a module that hides another one; and nothing else."""
    change, told = _CHANGES[what]
    change(tmp_path)
    assert noted.find_changed() == (str(tmp_path / told) if told else "")


def test_a_file_written_since_the_process_began_counts_as_changed(tmp_path: Path) -> None:
    """What it has loaded may be older; and the libraries that it has mapped are among its files."""
    made = Loaded(list_importable)
    (tmp_path / "written").touch()
    made.note(str(tmp_path / "written"))
    assert made.find_changed() == str(tmp_path / "written")
    assert any("libc" in path for path in loaded_modules._list_mapped())


def test_what_the_process_has_written_itself_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module made from a template, in a temporary folder that was made for it, as torch 2.8 does: the first rank that exits removes it. One in a folder that was known before is the user's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "known")])
    made = Loaded(list_importable)
    for folder in ("made", "known"):
        (tmp_path / folder).mkdir()
        module = types.ModuleType(folder)
        module.__file__ = str(tmp_path / folder / "it.py")
        (tmp_path / folder / "it.py").touch()
        made.note_module(module)
        assert made.find_changed() == ("" if folder == "made" else module.__file__)


def test_of_two_servers_for_the_same_runs_the_younger_one_ends(tmp_path: Path) -> None:
    """Two launchers at once start two; one that is dead, or has another key, does not count."""
    server = Resident.__new__(Resident)
    server._orders = {"folder": str(tmp_path), "key": "abc"}
    for name in (f"abc-{os.getpid()}.sock", f"abd-{os.getppid()}.sock", "abc-99999999.sock", "abc-x.sock"):
        (tmp_path / name).touch()
    assert not server._find_elder()
    (tmp_path / "abc-1.sock").touch()
    assert server._find_elder()


def test_what_a_fork_can_not_be_given_is_read() -> None:
    """The memory's policy, as numactl sets it, is among the facts of a process; so is who traces it."""
    assert read_process_facts("self").get("memory", "default") == "default"
    assert read_tracer() == 0
    code = (
        "import ctypes; from rankwise.launcher.process_facts import read_tracer, read_process_facts as read\n"
        "libc = ctypes.CDLL(None); libc.ptrace(0, 0, 0, 0); node = ctypes.c_ulong(1)\n"
        "done = libc.syscall({'x86_64': 238, 'aarch64': 237}[__import__('os').uname().machine], 3, ctypes.byref(node), 64)\n"
        "print(read_tracer(), done or read('self').get('memory', 'interleave:0'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    tracer, policy = done.stdout.split()
    assert tracer == str(os.getpid()), done.stderr
    assert policy in {"interleave:0", "-1"}  # a sandbox may forbid that
