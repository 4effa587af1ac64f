"""The bar on a terminal: it fits, goes away, and never tears what is printed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rankwise.train.events import Evaluated, Started
from rankwise.train.loggers import outlet
from rankwise.train.loggers.bar import Moment, fit
from rankwise.train.loggers.progress import Progress
from told_training import FakeClock, ended, play, report, started

TESTS = Path(__file__).parents[1]


class Terminal(io.StringIO):
    """Text that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


def evaluated(step: int, **more: Any) -> Evaluated:
    facts = {"metrics": {"accuracy": 0.75, "loss": 1.25}, "seconds": 0.25, **more}
    return Evaluated(step=step, epoch=0, **facts)


@given(
    width=st.integers(1, 200),
    num_steps=st.none() | st.integers(0, 10**6),
    facts=st.lists(st.tuples(st.integers(0, 9), st.text("abc 123", min_size=1, max_size=30)), min_size=1, max_size=6),
)  # fmt: skip
def test_the_bar_fits_any_terminal(width: int, num_steps: int | None, facts: list[tuple[int, str]]) -> None:
    """Bar and texts with the gaps between them never need more columns than there are, and the most important text stays."""
    moment = Moment(step=0, num_steps=num_steps, facts=tuple(facts))
    texts, bar_width = fit(moment, width)
    assert sum(map(len, texts)) + 2 * (len(texts) - 1) + (bar_width + 2 if bar_width else 0) <= width
    least = min(rank for rank, _ in facts)
    assert any(text[:width] in texts for rank, text in facts if rank == least)


def test_the_least_important_goes_first() -> None:
    """In a narrow terminal the epoch goes first, then the drawn bar, then the learning rate; the count of steps stays."""
    moment = Moment(step=5, num_steps=10, facts=((6, "epoch 1/2"), (0, "5/10"), (1, "loss 0.5"), (4, "lr 0.1")))
    seen = [fit(moment, width) for width in (80, 42, 30, 20, 6, 3)]
    assert seen == [
        (["epoch 1/2", "5/10", "loss 0.5", "lr 0.1"], 40),
        (["5/10", "loss 0.5", "lr 0.1"], 18),
        (["5/10", "loss 0.5", "lr 0.1"], 0),
        (["5/10", "loss 0.5"], 0),
        (["5/10"], 0),
        (["5/1"], 0),
    ]


def test_eighty_columns_hold_the_learning_rate(terminal: Terminal) -> None:
    """On a usual terminal a long training with many epochs shows step, loss, rate, speed and the time left."""
    logger = Progress(terminal, clock=FakeClock())
    facts = {"metrics": {"accuracy": 0.5}, "eta_s": 45296.0, "tokens_per_s": 123456.0}
    event = Started(step=0, num_steps=200_000, epoch=0, num_epochs=1000, world_size=8, global_batch=512)
    play(logger, event, report(123_456, 0.4312, lrs=(1.234e-05,), **facts), evaluated(123_456), ended(123_456))
    for part in ("123456/200000  loss 0.4312  lr 1.234e-05  123k tokens/s  12:34:56 left",):
        assert part in terminal.getvalue(), part


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal of 80 columns."""
    pytest.importorskip("rich")
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    return Terminal()


def test_the_bar_shows_the_last_report_and_goes_away(terminal: Terminal) -> None:
    """While it runs, the line has step, loss and speed; evaluations are lines of their own; at the end only the text lines stay."""
    logger = Progress(terminal, clock=FakeClock())
    threads = set(threading.enumerate())
    play(logger, started(), report(4, 0.5, 0.25, eta_s=65.0))
    terminal.truncate(0)
    terminal.seek(0)
    play(logger, evaluated(4))
    text = terminal.getvalue()
    for part in ("step  4/20  epoch 1/2  evaluation: accuracy 0.75, loss 1.25", "4/20", "loss 0.375", "40.0 samples/s", "1:05 left"):  # fmt: skip
        assert part in text, part
    play(logger, ended(4))
    rest = terminal.getvalue()
    assert rest.endswith("rankwise: done after step 4 of 20; loss 0.375; 4 steps in 0:02, 2.00 steps/s\n")
    # Erased, and the cursor is to be seen.
    assert "\x1b[2K" in rest[-200:]
    assert rest.rfind("\x1b[?25h") > rest.rfind("\x1b[?25l")
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


def test_the_cursor_is_never_left_hidden(terminal: Terminal) -> None:
    """A rank that is killed while the bar is there leaves a terminal with a cursor."""
    logger = Progress(terminal)
    play(logger, started())
    text = terminal.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    play(logger, ended(0))


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", "unknown")])
def test_terminals_that_cannot_move_the_cursor_get_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """In an editor's shell there are plain lines without a single control sign."""
    monkeypatch.setenv(name, value)
    play(Progress(terminal), started(), report(1, 0.5), ended(1))
    assert "\x1b" not in terminal.getvalue()
    assert "loss 0.5" in terminal.getvalue()


def test_no_color_is_heeded(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR the bar has no colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    play(Progress(terminal), started(), report(1, 0.5), evaluated(1), ended(1))
    assert "\u2501" in terminal.getvalue()
    assert "\x1b[3" not in terminal.getvalue()


def test_without_rich_there_are_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal without rich gets what a log file gets, and once in a process how to get the bar."""
    for name in ("rich.console", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(outlet, "_hinted", set())
    for _ in range(2):
        play(Progress(terminal), started(), report(1, 0.5), ended(1))
    lines = terminal.getvalue().splitlines()
    assert lines[1] == "rankwise: pip install 'rankwise[train]' for a progress bar"
    assert lines[2].startswith("step  1/20  epoch 1/2  loss 0.5")
    assert sum("pip install" in line for line in lines) == 1


def test_a_training_whose_length_is_unknown_has_no_bar(terminal: Terminal) -> None:
    """There is the step, and the time since the start, but no bar that would have to guess."""
    event = Started(step=0, num_steps=None, epoch=0, num_epochs=None, world_size=1, global_batch=1)
    play(Progress(terminal), event, report(3, 0.5), evaluated(3), ended(3))
    assert "step 3" in terminal.getvalue()
    assert "\u2501" not in terminal.getvalue()


def test_a_second_training_of_the_same_logger(terminal: Terminal) -> None:
    """fit() again, after one that never told its end: one bar, no thread left."""
    logger = Progress(terminal)
    threads = set(threading.enumerate())
    play(logger, started(), report(1, 0.5), started(), report(1, 0.5), ended(1))
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


def run_on_terminal(code: str) -> tuple[int, str]:
    """Run Python code with a pseudo-terminal as its output.

    Returns:
        Its exit code and all that came out.
    """
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHON_COLORS": "0"}
    # A fork while threads run is what these tests are about; newer Pythons warn of it.
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], cwd=TESTS, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:  # fmt: skip
        os.close(theirs)
        seen = b""
        try:
            while data := os.read(ours, 4096):
                seen += data
        except OSError:  # the last user of the terminal is gone
            pass
        os.close(ours)
        return process.wait(60), seen.decode()


@pytest.mark.linux
def test_what_the_script_prints_stays_whole() -> None:
    """Long lines, square brackets and half lines reach the terminal as they were printed, above the bar; afterwards all is as before."""
    pytest.importorskip("rich")
    code = """
import sys
from rankwise.train.loggers.progress import Progress
from told_training import ended, play, report, started
logger, out, err = Progress(), sys.stdout, sys.stderr
play(logger, started(), report(1, 0.5))
print("[bold]path[/] " + "/a long path" * 12)
print("to standard error", file=sys.stderr)
play(logger, report(2, 0.5), ended(2))
assert (sys.stdout, sys.stderr) == (out, err)
"""
    code_, text = run_on_terminal(code)
    assert code_ == 0, text
    lines = text.replace("\r\n", "\n").split("\n")
    assert any(line.endswith("[bold]path[/] " + "/a long path" * 12) for line in lines)
    assert any(line.endswith("to standard error") for line in lines)


@pytest.mark.linux
def test_output_to_a_file_is_not_caught(tmp_path: Path) -> None:
    """With standard output in a file and the bar on the terminal, what is printed goes to the file."""
    pytest.importorskip("rich")
    code = f"""
import sys
sys.stdout = open({str(tmp_path / "out")!r}, "w")
from rankwise.train.loggers.progress import Progress
from told_training import ended, play, report, started
logger = Progress()
play(logger, started())
print("result 42")
play(logger, ended(0))
"""
    assert run_on_terminal(code)[0] == 0
    assert (tmp_path / "out").read_text() == "result 42\n"


@pytest.mark.linux
def test_a_forked_worker_can_print() -> None:
    """A worker that is forked while the bar is being drawn does not wait for a lock that nobody in it holds."""
    pytest.importorskip("rich")
    code = """
import os, threading
from rankwise.train.loggers.progress import Progress
from told_training import ended, play, started
logger = Progress()
play(logger, started())
held, over = threading.Event(), threading.Event()
def hold():
    with logger._bar._live._lock, logger._bar._console._lock:
        held.set()
        over.wait()
threading.Thread(target=hold).start()
held.wait()
if (pid := os.fork()) == 0:
    print("the worker speaks", flush=True)
    os._exit(0)
over.set() if os.waitpid(pid, 0) else None
play(logger, ended(0))
"""
    code_, text = run_on_terminal(code)
    assert code_ == 0
    assert "the worker speaks" in text


@pytest.mark.linux
def test_a_bar_that_nobody_stops_ends_with_python() -> None:
    """An exception that leaves the training without a word ends the process with its traceback, not with a fault of the drawing thread."""
    pytest.importorskip("rich")
    code = """
from rankwise.train.loggers.progress import Progress
from told_training import play, report, started
play(Progress(), started(), report(1, 0.5))
raise KeyError("gone")
"""
    code_, text = run_on_terminal(code)
    assert code_ == 1
    assert "KeyError: 'gone'" in text
    assert "Fatal Python error" not in text
