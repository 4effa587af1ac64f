"""What a rank notes of how it ends, and that it ends all the same.

PYTEST_DONT_REWRITE: an assertion here has no words of pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.evidence.in_rank import recorder

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
    message = recorder._describe(caught.value, caught.value.__traceback__)["message"]
    assert message.splitlines()[0] == first


@pytest.mark.linux
@pytest.mark.parametrize("is_full", [False, True])
def test_os_exit_never_waits(is_full: bool, tmp_path: Path) -> None:
    """A watchdog calls os._exit where nothing else gets on: with a pipe for standard error that nobody reads the rank ends as well, and notes the line."""
    places = [tmp_path / "notes", tmp_path / "stacks"]
    for place in places:
        place.touch()
    read_end, write_end = os.pipe()
    words = [sys.executable, "-c", _CODE, str(recorder.__file__), *map(str, places), str(int(is_full))]
    try:
        assert subprocess.run(words, stderr=write_end, timeout=20, check=False).returncode == 7
        assert '"note": "left"' in places[0].read_text()
        assert (b"-2-" in os.read(read_end, 1 << 20)) is not is_full
    finally:
        os.close(read_end)
        os.close(write_end)
