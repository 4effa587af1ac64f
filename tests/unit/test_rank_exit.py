"""What a rank notes of how it ends, and that it ends all the same.

PYTEST_DONT_REWRITE: an assertion here has no words of pytest's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.evidence.in_rank import rank_exit

if TYPE_CHECKING:
    from pathlib import Path

_CODE = """
import importlib.util, os, sys

spec = importlib.util.spec_from_file_location("recorder", sys.argv[1])
recorder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recorder)
known = [(status.st_dev, status.st_ino) for status in (os.stat(sys.argv[2]), os.stat(sys.argv[3]), os.fstat(2))]
recorder.arm(notes=sys.argv[2], stacks=sys.argv[3], stack_signal=None, lifeline=None, identities=sum(known, ()), end_mark="-{}-")
os.set_blocking(2, False)
try:
    while int(sys.argv[4]):
        os.write(2, b"x")
except BlockingIOError:
    os.set_blocking(2, True)
{end}
"""
_RAISES = """
def note(*words, **facts):
    raise KeyboardInterrupt
recorder._Recorder.note = note
try:
    os._exit(7)
except BaseException:
    sys.exit(1)
"""
#: A child that could not be muffled: the notes are the rank's own.
_FORKS = """
child = os.fork()
if not child:
    os.dup2(kept, noted)
    os._exit(0)
os.waitpid(child, 0)
sys.exit(7)
"""
_OWN_MODULE = """
import pathlib
pathlib.Path(sys.argv[2]).with_name("select.py").write_text("raise SystemExit(9)")
sys.path.insert(0, os.path.dirname(sys.argv[2]))
sys.modules.pop("select", None)
sys.meta_path[:] = [one for one in sys.meta_path if "BuiltinImporter" not in repr(one)]
os._exit(7)
"""


def _check(path: str) -> None:
    assert path.startswith("/data")


def _fail() -> None:
    raise RuntimeError("\n        Failed to run stage backward:\n        Stage output: (4, 16)\n")


@pytest.mark.parametrize(
    ("call", "first"),
    [
        (lambda: _check("/mnt"), 'AssertionError: assert path.startswith("/data")'),
        (_fail, "RuntimeError: Failed to run stage backward:"),
    ],
)
def test_the_first_line_of_an_error_says_something(call: object, first: str) -> None:
    """Of an assertion without words its line is told, and empty lines in front of a text are not."""
    assert callable(call)
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        call()
    message = rank_exit._describe(caught.value, caught.value.__traceback__)["message"]
    assert message.splitlines()[0] == first


@pytest.mark.linux
@pytest.mark.parametrize("is_full", [False, True])
def test_os_exit_never_waits(is_full: bool, tmp_path: Path) -> None:
    """A watchdog calls os._exit where nothing else gets on: with a pipe for standard error that nobody reads the rank ends as well, and notes the line."""
    places = [tmp_path / "notes", tmp_path / "stacks"]
    for place in places:
        place.touch()
    read_end, write_end = os.pipe()
    code = _CODE.replace("{end}", "os._exit(7)")
    words = [sys.executable, "-c", code, str(rank_exit.__file__), *map(str, places), str(int(is_full))]
    try:
        assert subprocess.run(words, stderr=write_end, timeout=20, check=False).returncode == 7
        assert '"note": "left"' in places[0].read_text()
        assert (b"-2-" in os.read(read_end, 1 << 20)) is not is_full
    finally:
        os.close(read_end)
        os.close(write_end)


def _run(end: str, folder: Path) -> tuple[int, list[dict[str, object]], bytes]:
    """Return a rank's exit code, its notes, and its standard error."""
    places = [folder / "notes", folder / "stacks"]
    for place in places:
        place.touch()
    words = [
        sys.executable,
        "-c",
        _CODE.replace("{end}", end),
        str(rank_exit.__file__),
        *map(str, places),
        "0",
    ]
    done = subprocess.run(words, capture_output=True, timeout=20, check=False)
    return done.returncode, [json.loads(line) for line in places[0].read_text().splitlines()], done.stderr


@pytest.mark.linux
def test_os_exit_does_not_return(tmp_path: Path) -> None:
    """A signal handler that raises while the call is noted does not keep the process alive."""
    assert _run(_RAISES, tmp_path)[0] == 7


@pytest.mark.linux
def test_of_a_call_of_os_exit_all_frames_are_noted(tmp_path: Path) -> None:
    """A timer's, or a library's, has the script's line further up, or nowhere."""
    (tmp_path / "timed").mkdir()
    for end in ("def stop():\n    os._exit(7)\nstop()", "import threading, time\nthreading.Timer(0, os._exit, [7]).start()\ntime.sleep(9)"):  # fmt: skip
        code, notes, _ = _run(end, tmp_path / "timed" if "Timer" in end else tmp_path)
        (left,) = (note for note in notes if note["note"] == "left")
        names = [name for _, _, name in left["frames"]]  # type: ignore[attr-defined]
        assert (code, names[:2]) == (
            7,
            ["run", "_bootstrap_inner"] if "Timer" in end else ["stop", "<module>"],
        )


@pytest.mark.linux
def test_a_childs_os_exit_is_not_the_ranks(tmp_path: Path) -> None:
    """A forked child whose notes still go to the rank's file, as where /dev/null could not be opened, writes none of its own."""
    code, notes, _ = _run(f"kept, noted = os.dup(3), 3\n{_FORKS}", tmp_path)
    assert (code, [note["note"] for note in notes if note["note"] == "left"]) == (7, [])


@pytest.mark.linux
def test_a_module_of_the_users_is_not_run_at_a_ranks_end(tmp_path: Path) -> None:
    """A select.py of the script's, or a folder of sys.path that hangs, is not looked at: the marks need no module."""
    code, _, words = _run(_OWN_MODULE, tmp_path)
    assert (code, words) == (7, b"-1--2-")
