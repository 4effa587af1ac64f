"""The picture of a run: all that happened and nothing else, and never in the way of the training."""

from __future__ import annotations

import math
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from rankwise.train.events import Evaluated
from rankwise.train.loggers import curves, drawing
from rankwise.train.loggers.curves import Curves
from rankwise.train.loggers.drawing import Course, smooth, thin
from rankwise.train.loggers.json_lines import JsonLines
from told_training import FakeClock, ended, play, report, started

if TYPE_CHECKING:
    from pathlib import Path


def evaluated(step: int, **more: Any) -> Evaluated:
    return Evaluated(step=step, epoch=0, **{"metrics": {"accuracy": step / 10}, "seconds": 0.5, **more})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note what would be drawn, and draw nothing."""
    found: list[dict[str, Any]] = []

    def note(course: Course, path: Path) -> None:
        found.append(
            {
                "path": path,
                "loss": dict(zip(course.loss.steps, course.loss.values, strict=True)),
                "lr": list(course.lr.steps),
                "speed": list(course.speed.steps),
                "metrics": {name: list(curve.steps) for name, curve in course.metrics.items()},
                "resumes": list(course.resumes),
                "means": {name: list(curve.steps) for name, curve in course.means.items()},
                "best": course.best,
            }
        )

    monkeypatch.setattr(drawing, "draw", note)
    return found


def test_it_is_drawn_at_the_end_and_once_a_minute(tmp_path: Path, drawn: list[dict[str, Any]]) -> None:
    """While it trains, at a report, when a minute has passed since the last drawing; and at the end."""
    clock = FakeClock()
    logger = Curves(tmp_path / "curves.svg", clock=clock)
    play(logger, started())
    counts = []
    for step in range(1, 10):
        clock.now += 20.0
        play(logger, report(step, 0.5))
        counts.append(len(drawn))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    play(logger, ended(9))
    assert len(drawn) == 4
    assert drawn[-1]["loss"] == dict.fromkeys(range(1, 10), 0.5)


def test_slow_drawing_takes_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a drawing takes 3 s, the next one waits for 300 s."""
    clock, moments = FakeClock(), []

    def take_long(course: Course, path: Path) -> None:
        moments.append(clock.now)
        clock.now += 3.0

    monkeypatch.setattr(drawing, "draw", take_long)
    logger = Curves(tmp_path / "curves.svg", clock=clock)
    play(logger, started())
    begin = clock.now
    for step in range(1, 80):
        clock.now += 10.0
        play(logger, report(step, 0.5))
    assert moments[0] == begin + 60
    assert all(later - sooner >= 303 for sooner, later in pairwise(moments))


def test_after_a_resume_all_that_happened_is_there(tmp_path: Path, drawn: list[dict[str, Any]]) -> None:
    """What came before is read from the journal, without what the resume took back; each step once."""
    journal, path = tmp_path / "journal.jsonl", tmp_path / "curves.svg"
    play(
        JsonLines(journal), started(), report(2, 0.5, 0.5), evaluated(2, is_best=True), report(4, 0.5, 0.5, metrics={"f1": 0.5}),
        evaluated(4, is_best=True),
    )  # fmt: skip
    for logger in (JsonLines(journal), Curves(path)):
        play(logger, started(step=3), report(5, 0.25, 0.25, metrics={"f1": 0.5}), evaluated(5), ended(5))
    [picture] = drawn
    assert picture["loss"] == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.25, 5: 0.25}
    assert picture["lr"] == [1, 2, 3, 4, 5]
    assert picture["metrics"] == {"accuracy": [2, 5]}
    assert picture["means"] == {"f1": [5]}
    assert picture["resumes"] == [3]
    assert picture["best"] == 2


@pytest.mark.parametrize("text", [None, "", "{}\n", '{"kind": "started", "time": 1}\n', "nonsense"])
def test_without_a_journal_it_begins_at_the_resume(
    tmp_path: Path, drawn: list[dict[str, Any]], text: str | None
) -> None:
    """A journal that is absent, cut or of another version costs the beginning of the picture only."""
    if text is not None:
        (tmp_path / "journal.jsonl").write_text(text)
    play(Curves(tmp_path / "curves.svg"), started(step=3), report(5, 0.25, 0.25), ended(5))
    assert drawn[0]["loss"] == {4: 0.25, 5: 0.25}


def test_a_new_training_draws_only_itself(tmp_path: Path, drawn: list[dict[str, Any]]) -> None:
    """An old journal in the folder, or a training that the same logger heard before, is not in the picture."""
    play(JsonLines(tmp_path / "journal.jsonl"), started(), report(2, 0.5, 0.5))
    logger = Curves(tmp_path / "curves.svg")
    play(logger, started(), report(1, 0.25), ended(1), started(), report(1, 0.125), ended(1))
    assert [picture["loss"] for picture in drawn] == [{1: 0.25}, {1: 0.125}]


def test_nothing_to_draw(tmp_path: Path, drawn: list[dict[str, Any]]) -> None:
    """A training without a report leaves an old picture alone."""
    play(Curves(tmp_path / "curves.svg"), started(), ended(0))
    assert drawn == []


def test_without_matplotlib_one_line_tells_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said at the start, once; nothing is drawn, and nothing is said at the end."""
    monkeypatch.setattr(curves, "find_spec", lambda _: None)
    logger = Curves(tmp_path / "curves.svg")
    play(logger, started())
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "pip install 'rankwise[train]'" in said.err
    play(logger, report(1, 0.5), evaluated(1), ended(1))
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_to_draw_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken matplotlib or a full disk: one warning, and no second attempt."""
    calls = []

    def fail(course: Course, path: Path) -> None:
        calls.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drawing, "draw", fail)
    clock = FakeClock()
    logger = Curves(tmp_path / "curves.svg", clock=clock)
    play(logger, started())
    clock.now += 100.0
    play(logger, report(1, 0.5), report(2, 0.5), ended(2))
    assert len(calls) == 1
    assert capsys.readouterr().err.count("rankwise: warning: [rank 0]") == 1


# ------------------------------------------------------------------------------------- the drawing


def texts_of(path: Path) -> str:
    """Return the words of an SVG; matplotlib keeps them as comments beside the letters' shapes."""
    ET.parse(path)  # well-formed, or an error
    return path.read_text(encoding="utf-8")


def style_of(matplotlib: Any) -> dict[str, Any]:
    # To ask for the backend chooses one, and loads pyplot.
    return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}


def test_the_real_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SVG with all parts, also with NaN, infinities and odd names; the user's backend and style are as before, and not used."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # LaTeX is not installed everywhere
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "#123456")
    before, had_pyplot = style_of(matplotlib), "matplotlib.pyplot" in sys.modules
    path = tmp_path / "run $5" / "curves.svg"
    play(
        Curves(path),
        started(),
        report(3, 100.0, 1.0, 0.5, metrics={"lost": 0.25, "grip": 1.5}),
        report(6, math.nan, math.inf, 0.25),
        evaluated(6, metrics={"loss": 0.5, "acc $x_1$ <&>": 0.5, "lost": math.nan}, is_best=True),
        ended(6),
    )
    text = texts_of(path)
    for part in ("<!-- run $5 -->", "<!-- lost -->", "<!-- training -->", "<!-- training: grip -->", "loss", "NaN or infinite at 2 steps, first 4", "evaluation: acc ", "learning rate", "samples a second"):  # fmt: skip
        assert part in text, part
    assert "#123456" not in text
    assert "evaluation: loss" not in text
    # Few points are not smoothed; below the loss, steps are named under the lowest panel of each of the three columns.
    assert "smoothed" not in text
    assert text.count("<!-- step -->") == 1 + 3
    assert style_of(matplotlib) == before
    assert had_pyplot or "matplotlib.pyplot" not in sys.modules
    assert [one.name for one in path.parent.iterdir()] == ["curves.svg"]


def test_what_a_mark_means_is_said_and_a_constant_looks_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The star of the best evaluation stands in its legend, and the axis of a learning rate that never changes begins at 0."""
    figures: list[Any] = []
    monkeypatch.setattr(
        pytest.importorskip("matplotlib.figure").Figure,
        "savefig",
        lambda self, *_, **__: figures.append(self),
    )
    course = Course()
    course.add_report(report(20, *[1.0] * 20, lrs=(0.01,) * 20))
    for step in (10, 20):
        course.metrics.setdefault("accuracy", drawing.Curve()).add(step, step / 40)
    course.best = 20
    drawing.draw(course, tmp_path / "curves.svg")
    axes = {one.get_title(loc="left"): one for one in figures[0].axes}
    legend = axes["evaluation: accuracy"].get_legend()
    assert [one.get_text() for one in legend.get_texts()] == ["best: step 20"]
    assert axes["learning rate"].get_ylim()[0] == 0
    assert axes["loss"].get_xlabel() == "step"


def test_a_long_training_is_a_small_picture(tmp_path: Path) -> None:
    """A hundred thousand steps make a file of some hundred kilobytes: a band from least to greatest with the mean in it."""
    pytest.importorskip("matplotlib")
    course = Course()
    course.add_report(report(100_000, *[1.0 + step % 7 for step in range(100_000)]))
    path = tmp_path / "curves.svg"
    drawing.draw(course, path)
    assert path.stat().st_size < 400_000
    assert "smoothed" in texts_of(path)


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=300),
    max_points=st.integers(1, 50),
)
def test_thinning_keeps_the_extremes(values: list[float], max_points: int) -> None:
    """However few points are left, the least and the greatest value are among them, means lie between, and steps grow."""
    steps, lows, means, highs = thin(range(1, len(values) + 1), values, max_points)
    assert len(steps) == len(lows) == len(means) == len(highs) <= max_points
    assert steps == sorted(set(steps))
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert min(value for value in lows if math.isfinite(value)) == min(finite)
        assert max(value for value in highs if math.isfinite(value)) == max(finite)
    for low, mean, high in zip(lows, means, highs, strict=True):
        assert math.isnan(mean) or low - 1e-6 <= mean <= high + 1e-6


@given(st.lists(st.floats(-100, 100) | st.just(math.nan), max_size=300))
def test_smoothing_is_a_mean_of_neighbours(values: list[float]) -> None:
    """As many points as before; a point is the mean of those around it that are finite, and NaN stays NaN."""
    found = smooth(values)
    assert len(found) == len(values)
    reach = len(values) // 40
    for at, (value, mean) in enumerate(zip(values, found, strict=True)):
        if math.isnan(value):
            assert math.isnan(mean)
            continue
        near = [one for one in values[max(0, at - reach) : at + reach + 1] if not math.isnan(one)]
        assert min(near) - 1e-6 <= mean <= max(near) + 1e-6
    if len(values) < 40:
        assert found == pytest.approx(values, nan_ok=True, abs=1e-9)


def test_smoothing_does_not_lag() -> None:
    """A straight line stays where it is."""
    line = [float(at) for at in range(400)]
    found = smooth(line)
    assert found[10:-10] == pytest.approx(line[10:-10])
