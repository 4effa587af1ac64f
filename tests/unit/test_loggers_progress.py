"""What people see of a training: readable logs, a bar that never tears what is printed, and nothing that ends the training."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.train.events import Ended, Evaluated, Started
from rankwise.train.loggers.number_text import describe_end, describe_start, format_amount, format_seconds
from rankwise.train.loggers.outlet import Outlet
from rankwise.train.loggers.progress import Progress
from told_training import FakeClock, ended, play, report, started

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[1]


def evaluated(step: int, **more: Any) -> Evaluated:
    facts = {"metrics": {"accuracy": 0.75, "loss": 1.25}, "seconds": 0.25, **more}
    return Evaluated(step=step, epoch=0, **facts)


# ------------------------------------------------------------------------------------- plain lines


def test_a_log_stays_readable(golden: Callable[[str, str], None]) -> None:
    """Without a terminal: the first report, one in ten seconds, the one before an evaluation, the last one; and never two in a hurry."""
    out, clock = io.StringIO(), FakeClock()
    logger = Progress(out, clock=clock)
    settings = {"optimizer": "AdamW fused", "lr": 0.005, "precision": "bf16", "micro_batch": 1}
    play(logger, started(folder="run", device="cpu", parameters=124_439_808, **settings))
    for step in range(1, 20):
        clock.now += 3.0
        more: dict[str, Any] = {"grad_norms": (2.5,)} if step > 10 else {}
        play(logger, report(step, 1.0 / step, epoch=step // 10, eta_s=(20 - step) * 3.0, **more))
        if step == 10:
            play(logger, evaluated(step, is_best=True, seconds=75.0))
    play(logger, ended(19))
    golden("train_progress", out.getvalue().rstrip("\n"))


@pytest.mark.parametrize("every", [1, 3, 20])
def test_the_loss_does_not_depend_on_the_reports(every: int) -> None:
    """Equal losses end in the same number, the mean of the last ten, however many steps a report has; a resume counts anew."""
    losses = [2.0 ** -(step % 7) for step in range(20)]
    out = io.StringIO()
    logger = Progress(out, clock=FakeClock())
    play(
        logger,
        started(),
        *[report(min(20, at + every), *losses[at : at + every]) for at in range(0, 20, every)],
    )
    play(logger, ended(20))
    assert out.getvalue().splitlines()[-1].split("; ")[1] == f"loss {sum(losses[-10:]) / 10:.4g}"
    play(logger, started(step=19), report(20, 0.5), ended(20))
    assert out.getvalue().splitlines()[-1].split("; ")[1] == "loss 0.5"


def test_tokens_are_the_speed_where_they_are_counted() -> None:
    """A loss that comes as (sum, count) is shown with what was counted a second, in place of samples."""
    out = io.StringIO()
    play(Progress(out, clock=FakeClock()), started(), report(1, 0.5, tokens_per_s=12345.0))
    line = out.getvalue().splitlines()[1]
    assert "12.3k tokens/s" in line
    assert "samples/s" not in line


def test_a_training_that_goes_on_says_so() -> None:
    """After a resume the first line names the step and the folder, and the last one counts only what this process did."""
    out = io.StringIO()
    logger = Progress(out, clock=FakeClock())
    play(logger, started(step=15, folder="run"), report(20, 0.5, 0.25), ended(20))
    head, _, end = out.getvalue().splitlines()
    assert head.endswith("; continues after step 15 of run")
    assert end == "rankwise: done after step 20; loss 0.375; 5 steps in 0:02, 2.50 steps/s"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "training on 1 rank, global batch 8, until it is stopped"),
        ({"num_steps": 1}, "training on 1 rank, global batch 8, 1 step"),
        ({"num_epochs": 3, "world_size": 2}, "training on 2 ranks, global batch 8, 3 epochs"),
        (
            {"num_steps": 9, "num_epochs": 1, "settings": {"lr": 1e-3, "micro_batch": 8, "device": "cuda"}},
            "training on 1 rank (cuda), global batch 8, 9 steps in 1 epoch, lr 0.001",
        ),
        (
            {"settings": {"lr": "by group", "micro_batch": 2, "precision": "fp16"}},
            "training on 1 rank, global batch 8 = 1 rank x 4 x 2, until it is stopped, lr by group, fp16",
        ),
        (
            {"world_size": 3, "num_steps": 2, "settings": {"micro_batch": 2, "parameters": 21}},
            "training on 3 ranks, global batch 8 in micro-batches of up to 2, 2 steps, 21 parameters",
        ),
        (
            {"world_size": 2, "num_steps": 2, "settings": {"micro_batch": 4, "parameters": 1}},
            "training on 2 ranks, global batch 8 = 2 ranks x 1 x 4, 2 steps, 1 parameter",
        ),
        (
            {"world_size": 2, "num_steps": 2, "settings": {"micro_batch": 16, "parameters": 21_000}},
            "training on 2 ranks, global batch 8, 2 steps, 21.0k parameters",
        ),
    ],
)
def test_the_first_line_tells_what_is_known(facts: dict[str, Any], expected: str) -> None:
    """Nothing is invented where the length or a setting is unknown."""
    base = {"step": 0, "num_steps": None, "epoch": 0, "num_epochs": None, "world_size": 1, "global_batch": 8}
    assert describe_start(Started(**{**base, **facts})) == expected


@pytest.mark.parametrize(
    ("reason", "is_over", "step", "expected"),
    [
        ("done", True, 20, "done after step 20; loss 0.5; 20 steps in 0:10, 2.00 steps/s"),
        ("done", True, 0, "done after step 0 of 20; loss 0.5; no step was left to do"),
        ("SIGUSR1", False, 0, "stopped (SIGUSR1) after step 0 of 20; loss 0.5; no step was done; not finished"),
        ("ValueError: a\n  b", False, 1, "stopped (ValueError: a) after step 1 of 20; loss 0.5; 1 step in 0:10, 0.10 steps/s; not finished"),
        ("", True, 20, "stopped () after step 20; loss 0.5; 20 steps in 0:10, 2.00 steps/s"),
    ],
)  # fmt: skip
def test_the_last_line_says_why(reason: str, is_over: bool, step: int, expected: str) -> None:
    """How it ended, how far it came, and how fast."""
    event = Ended(step=step, epoch=0, reason=reason, is_over=is_over, elapsed_s=10.0)
    assert describe_end(event, started(), 0.5) == expected


def test_the_last_line_needs_nothing_before_it() -> None:
    """A training that fails at once, before its start was told, still says why."""
    out = io.StringIO()
    play(Progress(out), ended(0, "ValueError: no data"))
    assert out.getvalue() == "rankwise: stopped (ValueError: no data) after step 0; no step was done; not finished\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (0.0, "0.00"), (0.1234, "0.12"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (999.4, "999"), (999.6, "1.00k"), (12345, "12.3k"), (999_600, "1.00M"), (3e9, "3.00G"), (5e13, "5e+13"), (float("nan"), "nan"), (float("inf"), "inf")],
)  # fmt: skip
def test_amounts_have_three_digits(value: float, text: str) -> None:
    """Large numbers are short, also where rounding moves them to the next letter."""
    assert format_amount(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0:00"), (0.4, "0:00"), (59.6, "1:00"), (3599.7, "1:00:00"), (86399, "23:59:59"), (86400, "1d 00:00:00"), (200000, "2d 07:33:20")],
)  # fmt: skip
def test_seconds_as_people_read_them(seconds: float, text: str) -> None:
    """Minutes, hours, days; never 0:60."""
    assert format_seconds(seconds) == text


# ------------------------------------------------------------------------------------- streams that break


class Broken(io.StringIO):
    """A stream that fails from its second line on."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        if self.getvalue():
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("I/O operation on closed file")]
)
def test_a_stream_that_breaks_ends_no_training(error: Exception) -> None:
    """When the reader is gone, the terminal hung up or the file was closed, nothing more is written, and nothing is raised."""
    out = Broken(error)
    play(Progress(out), started(), report(1, 0.5), evaluated(1), report(2, 0.5), ended(2))
    assert out.getvalue().count("\n") == 1


def test_a_process_without_standard_error_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python has no standard error at all, as under pythonw, nothing is written."""
    monkeypatch.setattr(sys, "stderr", None)
    play(Progress(), started(), report(1, 0.5), ended(1))


def test_signs_that_a_stream_lacks_are_spelled_out() -> None:
    """A metric's name in a script that the log can't hold does not cost the line."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    Outlet(stream).say("Güte 0.5")
    assert raw.getvalue() == b"G\\xfcte 0.5\n"


@pytest.mark.linux
def test_a_reader_that_leaves_does_not_change_the_exit_code() -> None:
    """A training whose standard error nobody reads any more ends with 0, at the exit of Python too."""
    code = """
import sys
from rankwise.train.loggers.progress import Progress
from told_training import ended, play, report, started
sys.stdin.readline()
play(Progress(), started(), *[report(step, 0.5) for step in range(1, 9)], ended(8))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=TESTS, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    process.communicate(b"go\n", timeout=60)
    assert process.returncode == 0


def test_a_step_asks_for_nothing() -> None:
    """on_step only sets a number: it neither writes nor looks at the clock."""

    class NoClock:
        def monotonic(self) -> float:
            raise AssertionError("the clock was asked")

        time = sleep = monotonic

    out, clock = io.StringIO(), FakeClock()
    logger = Progress(out, clock=clock)
    play(logger, started())
    logger._clock = NoClock()  # type: ignore[assignment]
    before = out.getvalue()
    for step in range(1, 100):
        logger.on_step(step)
    assert out.getvalue() == before
