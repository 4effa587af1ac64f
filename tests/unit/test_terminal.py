"""What others have written, on our terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.base import host
from rankwise.base.terminal import strip_escapes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0\x1b\\sixel", "sixel"),
        ("\x1b(Btext\x1bM", "text"),
        ("\x1b\x1b[31m[31mtwice", "?[31mtwice"),
        ("\x1b]0;no end", "?]0;no end"),
        ("\x9b31mC1\x85", "?31mC1?"),
        ("tab\tand\r\nline\r", "tab\tand\nline?"),
        ("caf\u00e9 \u4f60\u597d \u202etxt", "caf\u00e9 \u4f60\u597d ?txt"),
    ],
)
def test_a_terminal_obeys_nothing_that_ranks_have_said(text: str, shown: str) -> None:
    """Colours, titles, links and pictures go; of what is left of such an order, or was split so that it forms anew, nothing works."""
    assert strip_escapes(text) == shown


def test_a_terminal_of_another_alphabet_hides_nothing() -> None:
    """`rankwise rule` has letters that ASCII lacks: they are written by number, and no command ends in a traceback."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "import sys; from rankwise.cli.main import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--n\u00f6des", "2"],
        env=env,
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
    assert b"\\xf6" in done.stderr


def test_a_process_may_have_any_name(tmp_path: Path) -> None:
    """Arguments and names of processes are bytes: those that are no UTF-8 are shown as far as they are."""
    (tmp_path / "cmdline").write_bytes(b"train\xff.py")
    assert host._read(tmp_path / "cmdline") == "train\ufffd.py"
