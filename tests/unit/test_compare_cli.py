"""`rankwise compare`: what it shows, what it exits with, what it draws, and that it needs no torch until checkpoints are read."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from journals import make_losses, write_run
from rankwise.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[2] / "src"
LOSSES = make_losses(100)
DRIFT = [loss * (1 + (-1) ** step * 1e-7 * 2 ** (step / 5)) for step, loss in enumerate(LOSSES)]
NAMES = [f"blocks.{block}.attention.projection.weight" for block in range(5)]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are named by short paths, at a fixed time and place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rankwise.base.clock.SystemClock.time", lambda _: 1767225600.0)


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Run the command; return exit code, output and errors."""
    code = main(["compare", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def write_diverging_pair() -> None:
    """Two runs that part slowly, with all that a journal can tell."""
    digests = dict.fromkeys(NAMES, "0")
    of_b = {20: dict.fromkeys(NAMES, 2.0), 100: {**dict.fromkeys(NAMES, 2.0), NAMES[1]: 2.1}}
    write_run(Path("one"), LOSSES, settings={"log_every": 10}, digests=digests, norms={20: dict.fromkeys(NAMES, 2.0), 100: dict.fromkeys(NAMES, 2.0)},
              metrics={50: {"accuracy": 0.8, "loss": 0.5}, 100: {"accuracy": 0.9, "loss": 0.25}}, grad_norms=LOSSES)  # fmt: skip
    write_run(Path("two"), DRIFT[:70], ranks=2, digests=digests, norms=of_b, metrics={50: {"accuracy": 0.8, "loss": 0.5001}}, grad_norms=DRIFT[:70],
              settings={"compile": True, "log_every": 5}, reason=None)  # fmt: skip
    write_run(Path("two"), DRIFT[60:], start=60, ranks=3, norms=of_b, metrics={100: {"accuracy": 0.92, "loss": 0.26}}, grad_norms=DRIFT[60:],
              settings={"compile": True, "log_every": 5})  # fmt: skip
    with Path("two/journal.jsonl").open("a") as file:
        file.write('{"kind": "rep')


def test_text_of_runs_that_part(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:  # fmt: skip
    """The verdict is on top; below it both runs, what differs, the table around the divergence, and likely reasons, in 80 columns."""
    write_diverging_pair()
    code, out, err = call(capsys, "one", "two")
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == "the runs diverge at step 51, slowly"
    assert max(map(len, out.splitlines())) <= 80
    # The hour is that of the reader's time zone.
    golden("compare_divergence", re.sub(r"begun \S+ \S+", "begun 2026-01-01 00:00", out.rstrip("\n")))


def test_text_of_runs_that_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal runs are said to be equal, exit code 0, and there is nothing likely to tell."""
    write_run(Path("one"), LOSSES)
    write_run(Path("two"), LOSSES)
    code, out, _ = call(capsys, "one", "two/journal.jsonl")
    assert code == 0
    assert out.splitlines()[0] == "the runs agree: 100 losses are equal to the bit"
    assert "none differs" in out
    assert "likely" not in out


def test_tolerance_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """The same two runs agree or part by the tolerance that is asked for, and it is shown."""
    write_run(Path("one"), LOSSES)
    write_run(Path("two"), [loss * (1 + 3e-5) for loss in LOSSES])
    assert call(capsys, "one", "two")[0] == 0
    code, out, _ = call(capsys, "one", "two", "--tolerance", "1e-5")
    assert code == 1
    assert "tolerance 1e-05, relative" in out


def test_losses_that_agree_do_not_hide_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal losses with another accuracy are no agreement; the verdict names the metric and the step."""
    write_run(Path("one"), LOSSES, metrics={50: {"accuracy": 0.8}})
    write_run(Path("two"), LOSSES, metrics={50: {"accuracy": 0.9}})
    code, out, _ = call(capsys, "one", "two")
    assert (code, out.splitlines()[0]) == (1, "the losses agree within 1.0e-04, but not all else: accuracy at step 50")  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "of_b", "said"),
    [
        (make_losses(100, seed=5), {"digests": {"w": "2"}, "global_batch": 96}, "the runs diverge at step 1: the initial weights differ"),
        (make_losses(100, seed=5), {"global_batch": 96}, "the runs diverge at step 1: the global batch is 48 in a, and 96 in b"),
        ([*LOSSES[:11], *make_losses(100, seed=5)[11:]], {"lr": 0.2}, "the runs diverge at step 12: the learning rates differ from step 1 on"),
        ([LOSSES[0] * (1 + 5e-5), *LOSSES[1:11], *make_losses(100, seed=5)[11:]], {}, "the runs diverge at step 12, and differ by more than rounding from step 1 on"),
        ([LOSSES[0] * (1 + 5e-5), *LOSSES[1:11], *make_losses(100, seed=5)[11:]], {"digests": {"w": "2"}}, "the runs diverge at step 12: the initial weights differ"),
        (make_losses(100, seed=5), {"lr": 0.2}, "the runs diverge at step 1, the first common one"),
    ],
)  # fmt: skip
def test_the_headline_names_a_certain_cause(
    capsys: pytest.CaptureFixture[str], losses: list[float], of_b: Any, said: str
) -> None:
    """Where the runs were not given the same, the first line says so; a rate is no cause of what differed before it was used."""
    write_run(Path("one"), LOSSES, digests={"w": "1"})
    write_run(Path("two"), losses, **{"digests": {"w": "1"}, **of_b})
    code, out, _ = call(capsys, "one", "two")
    assert (code, out.splitlines()[0]) == (1, said)
    assert len(said) <= 80


def test_several_runs_are_held_against_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """With three runs there are two comparisons; one that parts makes the exit code 1."""
    for name, losses in (("one", LOSSES), ("two", LOSSES), ("three", make_losses(100, seed=3))):
        write_run(Path(name), losses)
    code, out, _ = call(capsys, "one", "two", "three")
    verdicts = [line for line in out.splitlines() if line.startswith("the runs")]
    assert (code, len(verdicts)) == (1, 2)
    assert "agree" in verdicts[0]
    assert "diverge at step 1" in verdicts[1]
    assert call(capsys, "one", "two", "one")[0] == 0


def test_json_tells_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """With --format json everything is there for programs, in valid JSON also where a loss is NaN."""
    write_run(Path("one"), LOSSES, ranks=1, norms={20: {"w": 1.0}})
    write_run(Path("two"), [*LOSSES[:40], math.nan, *LOSSES[41:]], ranks=2, norms={20: {"w": 1.5}})

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    code, out, _ = call(capsys, "one", "two", "--format", "json")
    (told,) = json.loads(out, parse_constant=refuse)
    assert (code, told["agree"], told["verdict"]) == (1, False, "the runs diverge at step 41, suddenly")
    comparison = told["comparison"]
    assert comparison["losses"]["divergence"] == {"step": 41, "a": LOSSES[40], "b": "NaN", "difference": "Infinity"}  # fmt: skip
    assert comparison["norms"]["diverged"][0]["name"] == "w"
    assert {"name": "ranks", "a": 1, "b": 2} in comparison["settings"]
    assert [told["b"][key] for key in ("path", "last_step", "ended")] == ["two/journal.jsonl", 100, "done"]
    assert told["reasons"][0]["fact"].startswith("the loss of b is nan")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["one"], "there is one run only: one"),
        ([], "the following arguments are required: RUN"),
        (["one", "nowhere"], "there is no file or folder nowhere"),
        (["one", "."], ". has no journal.jsonl; there is one in late, one"),
        (["one", "late"], "the runs have no step in common"),
        (["one", "one", "--tolerance", "-1"], "tolerance=-1.0"),
        (["one", "one", "--tolerance", "x"], "--tolerance 'x' is not a number"),
        (["one", "one", "--plot", "x.gif"], "--plot x.gif: the name has the unknown ending .gif"),
        (["one", "one", "--plot", "nowhere/x.svg"], "can't write nowhere/x.svg"),
        (["one", "one", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_what_can_not_be_compared_is_an_error(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Each mistake is one error with exit code 2, which no verdict has."""
    write_run(Path("one"), LOSSES)
    write_run(Path("late"), LOSSES, start=200)
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"rankwise: {said}")
    assert "\n  -> " in err or "can't write" in said


def test_the_picture_shows_both_curves_and_the_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    """With --plot an SVG is drawn, with the runs' names, the tolerance and the step at which they diverge; without it none is."""
    write_diverging_pair()
    call(capsys, "one", "two")
    assert not [*Path().glob("*.svg")]
    assert call(capsys, "one", "two", "--plot", "both.svg")[0] == 1
    drawn = Path("both.svg").read_text()
    # matplotlib writes each text as a comment beside its shapes.
    largest = f"most at step 100: {NAMES[1]}"
    for text in (
        "a: one",
        "b: two",
        "they diverge at step 51",
        "tolerance 1e-04",
        "losses: relative difference",
        largest,
    ):
        assert f"<!-- {text} -->" in drawn, text
    # The norms are equal at step 20; the losses never are.
    assert drawn.count("<!-- equal to the bit -->") == 1


def test_equal_steps_are_seen_in_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that are equal to the bit are drawn as such, and not left out as if nothing were known of them."""
    write_run(Path("one"), LOSSES)
    write_run(Path("two"), [*LOSSES[:50], *DRIFT[50:]])
    call(capsys, "one", "two", "--plot", "both.svg")
    drawn = Path("both.svg").read_text()
    assert drawn.count("<!-- equal to the bit -->") == 1
    assert "largest of the norms" not in drawn


def test_the_picture_of_odd_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal runs, NaN, negative losses, one step, tolerance 0, and very long runs are drawn without a warning."""
    spiky = [math.sin(step / 100) - (5.0 if step == 7777 else 0.0) for step in range(20_000)]
    odd = {"equal": LOSSES, "nan": [math.nan] * 100, "negative": [-one for one in LOSSES], "short": LOSSES[:1], "long": spiky}  # fmt: skip
    write_run(Path("one"), LOSSES)
    for name, losses in odd.items():
        write_run(Path(name), losses, every=1000)
    assert call(capsys, "one", *odd, "--plot", "odd.svg", "--tolerance", "0")[0] == 1
    assert call(capsys, "equal", "one", "--plot", "equal.png")[0] == 0
    assert Path("equal.png").read_bytes().startswith(b"\x89PNG")
    # Thinned, and yet with its peak: without thinning the file would have 20 000 points.
    assert Path("odd.svg").stat().st_size < 1_000_000


def test_journals_are_compared_without_torch(tmp_path: Path) -> None:
    """Neither torch nor numpy is imported to compare journals; and where torch is absent, checkpoints are left out with a note."""
    write_diverging_pair()
    code = """
        import sys
        sys.modules["torch"] = None
        from rankwise.cli.main import main
        code = main(["compare", "one", "two"])
        assert "numpy" not in sys.modules
        sys.exit(code)
    """
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "not compared" not in done.stdout
    for run in ("one", "two"):
        _pretend_checkpoint(Path(run))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "their checkpoints were not compared: this Python can't import torch" in " ".join(done.stdout.split())  # fmt: skip


def _pretend_checkpoint(run: Path) -> None:
    import torch

    from rankwise import checkpoint

    checkpoint.save(run, {"value": torch.zeros(2)}, step=10)
