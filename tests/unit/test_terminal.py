"""What others have written, on our terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankwise.base import host, terminal
from rankwise.base.terminal import strip_escapes, wrap
from rankwise.cli.main import main
from rankwise.launcher.run_flags import build_parser

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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short", "short"),
        ("rankwise: waiting for the other nodes of this job", "rankwise: waiting for the other nodes of\n  this job"),
        ("  -> set GLOO_SOCKET_IFNAME to the one that is up", "  -> set GLOO_SOCKET_IFNAME to the one\n     that is up"),
        ("\x1b[1mbold letters that need no column at all\x1b[0m", "\x1b[1mbold letters that need no column at all\x1b[0m"),
        ("log /a/very/long/path/that/is/to/be/clicked/on/stderr.log", "log /a/very/long/path/that/is/to/be/clicked/on/stderr.log"),
        ("    | a line of somebody's log that is longer than that", "    | a line of somebody's log that is longer than that"),
        ("12 | loss = model(batch).some().more().words().here(1, 2)", "12 | loss = model(batch).some().more().words().here(1, 2)"),
    ],
)  # fmt: skip
def test_lines_break_between_words(text: str, shown: str) -> None:
    """On a terminal of 40 columns; in a file, or on one that is too narrow, no line breaks."""
    assert wrap(text, 40) == shown
    assert wrap(text, None) == wrap(text, 20) == text


@pytest.mark.parametrize("columns", ["70", "80"])
def test_help_breaks_no_flag(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag is spelled once, with hyphens, and never broken at one; no line is wider than the terminal but for a flag with its values."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = build_parser({}).format_help().splitlines()
    assert not [line for line in lines if line.endswith("-") or "_rank" in line.partition("  ")[0]]
    assert [line for line in lines if len(line) > int(columns) and not line.startswith("  --")] == []
    assert any(line.startswith("  --nproc-per-node NPROC_PER_NODE") for line in lines)


def test_the_list_of_commands_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """`rankwise --help`."""
    assert main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("argv", [["doctor", "--list"], ["rules"], ["rule", "RW101"], ["rule", "D14"]])
def test_tables_and_pages_fit_80_columns(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, also on one behind a pager: then standard error is the terminal, and a page is as wide as that."""
    monkeypatch.setattr(terminal, "width", lambda fd=2: 80 if fd == 1 or argv[0] == "rule" else None)
    assert main(argv) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    if argv[0] == "rule":
        monkeypatch.setattr(terminal, "width", lambda fd=2: 60 if fd == 2 else None)
        assert main(argv) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


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
