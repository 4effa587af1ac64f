"""How a rank's end is noted: who ended by itself must not look stopped, or nobody is found who left the others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from rankwise.launcher.rank_end import Rank, describe_end

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("stopped_s", "ended_s", "kept"), [(None, 5.0, None), (4.0, 5.0, 4.0), (5.5, 5.0, None)])
def test_a_stop_that_came_after_the_end_is_none(stopped_s: float | None, ended_s: float, kept: float | None) -> None:
    """A busy launcher hears of an end late, and tells the rank to stop meanwhile: it had left by itself."""
    rank = Rank(rank=2, local_rank=1, tag="2", streams=Mock(), notes_fd=-1, stacks_fd=-1, stopped_s=stopped_s)
    rank.note_end(0, ended_s)
    assert (rank.code, rank.ended_s, rank.stopped_s, rank.is_alive) == (0, ended_s, kept, False)


@pytest.mark.parametrize(("code", "left_at"), [(0, "/job/train.py:12"), (5, "/job/train.py:12"), (-9, None)])
def test_the_line_that_called_os_exit_is_no_crash(code: int, left_at: str | None, tmp_path: Path) -> None:
    """It is told with any exit code, 0 above all; a rank that was killed has left by no call."""
    texts = ('{"note": "left", "frames": [["/job/train.py", 12, "f"]]}\n', "")
    fds = []
    for number, text in enumerate(texts):
        (tmp_path / str(number)).write_text(text)
        fds.append(os.open(tmp_path / str(number), os.O_RDONLY))
    streams = Mock(error_file=tmp_path / "none", log=tmp_path / "none")
    rank = Rank(rank=0, local_rank=0, tag="0", streams=streams, notes_fd=fds[0], stacks_fd=fds[1], code=code)
    end = describe_end(rank, last_words="", stopped_s=None, asks_requeue=False)
    assert (end.left_at, end.where, end.crash) == (left_at, left_at, None)
    rank.evidence = None
    rank.close()


_HANDLED = '{"note": "exit", "message": "%s", "traceback": "T", "time_s": 1, "monotonic_s": 2, "where": "train.py:5", "code": %d}'
_ADVICE = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."


@pytest.mark.parametrize(
    ("message", "last_words", "code", "is_cause"),
    [
        ("ConfigError: Could not override 'lrx'.", f"Could not override 'lrx'.\n\n{_ADVICE}", 1, True),
        (
            "OSError: no metrics server",
            "OSError: no metrics server\nfatal: loss is nan",
            7,
            False,
        ),  # its exit was caught
        ("KeyError: 4", "fatal: 4 arguments are wanted", 1, False),
        ("NoSuchOption: No such option: --lrx", "\x1b[31m│\x1b[0m No such option: --lrx │\n╰──╯", 2, True),
        ("KeyError: 'lr'", "the configuration is not complete", 1, False),
        ("Exit: 3", "Error: 3 files are missing", 3, False),
        ("Abort", "Aborted!", 1, False),
        ("KeyError: 'lr'", "KeyError: 'lr'", -9, False),
        ("KeyError: 'lr'", "KeyError: 'lr'", 0, False),
    ],
)
def test_an_exception_that_the_script_shows_itself_is_the_cause(
    message: str, last_words: str, code: int, *, is_cause: bool, tmp_path: Path
) -> None:
    """What was handled at sys.exit is the cause if the script has printed its text, whatever advice stands behind that; else its own words count."""
    fds = []
    for number, text in enumerate((_HANDLED % (message, 1 if code == 7 else code) + "\n", "")):
        (tmp_path / str(number)).write_text(text)
        fds.append(os.open(tmp_path / str(number), os.O_RDONLY))
    streams = Mock(error_file=tmp_path / "none", log=tmp_path / "none")
    rank = Rank(rank=0, local_rank=0, tag="0", streams=streams, notes_fd=fds[0], stacks_fd=fds[1], code=code)
    end = describe_end(rank, last_words=last_words, stopped_s=None, asks_requeue=False)
    assert (end.fault is not None) is is_cause
    if end.fault is not None:
        assert (end.fault.message, end.fault.callstack, end.where) == (message, "", "train.py:5")
    rank.close()
