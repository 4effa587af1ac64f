"""A run's journal, read back: what happened, without what a later start has taken back."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st

from journals import make_losses, write_run
from rankwise.base.errors import UsageError
from rankwise.train.journal import read_journal

if TYPE_CHECKING:
    from pathlib import Path


def test_what_a_logger_writes_is_read_back(tmp_path: Path) -> None:
    """Losses, rates, gradient norms, parameter norms, evaluations and the end come back as they were told, also those not finite.

    Several records of norms in one report, as at the first steps of a fast training, are told by their steps.
    """
    losses = [*make_losses(22), math.nan, math.inf, -math.inf]
    run = write_run(
        tmp_path / "run", losses, ranks=2, lr=0.5, grad_norms=losses, digests={"w": "00ff"}, norms={1: {"w": 1.0}, 2: {"w": math.inf}, 20: {"w": 3.0}},
        metrics={10: {"accuracy": 0.5, "loss": math.nan}}, settings={"note": "NaN"},
    )  # fmt: skip
    told = read_journal(run)
    assert [*told.losses()] == [*range(1, 26)]
    assert [*map(repr, told.losses().values())] == [*map(repr, losses)]
    assert [*map(repr, told.grad_norms().values())] == [*map(repr, losses)]
    assert set(told.lrs().values()) == {0.5}
    assert told.norms() == {1: {"w": 1.0}, 2: {"w": math.inf}, 20: {"w": 3.0}}
    assert told.starts[0].started.digests == {"w": "00ff"}
    assert math.isnan(told.evaluations[0].metrics["loss"])
    assert (told.ended and told.ended.reason, told.last_step, told.num_skipped) == ("done", 25, 0)
    # A text is a text: settings are the user's words.
    assert told.starts[0].started.settings["note"] == "NaN"


def test_a_resume_takes_back_what_was_told_of_later_steps(tmp_path: Path) -> None:
    """After a start at step 25, losses, evaluations and norms of the old steps above 25 are gone, and the new ones count."""
    old, new = make_losses(50, seed=1), make_losses(15, seed=2)
    run = write_run(tmp_path / "run", old, norms={20: {"w": 1.0}, 22: {"w": 1.5}, 26: {"w": 1.7}, 30: {"w": 2.0}}, metrics={20: {"a": 1.0}, 40: {"a": 2.0}}, reason=None)  # fmt: skip
    write_run(run, new, start=25, ranks=3)
    told = read_journal(run)
    assert told.losses() == dict(enumerate([*old[:25], *new], 1))
    assert [one.step for one in told.evaluations] == [20]
    assert told.norms() == {20: {"w": 1.0}, 22: {"w": 1.5}}
    cut = next(one for one in told.reports if one.step == 25)
    assert cut.losses == tuple(old[20:25])
    assert math.isclose(cut.loss, sum(old[20:25]) / 5)
    assert (cut.samples, cut.metrics, cut.norms) == (25 * 48, {}, {22: {"w": 1.5}})
    assert [one.started.step for one in told.starts] == [0, 25]
    assert [told.started_for(step).world_size for step in (1, 25, 26, 40)] == [1, 1, 3, 3]


def test_a_start_from_before_takes_later_starts_back(tmp_path: Path) -> None:
    """A run that continues after step 10, although it had gone on after 20 before, has not had that second start."""
    run = write_run(tmp_path / "run", make_losses(30), metrics={10: {"a": 1.0}, 20: {"a": 2.0}}, reason=None)
    write_run(run, make_losses(10), start=20, ranks=2, reason=None)
    assert [one.step for one in read_journal(run).evaluations] == [10, 20]
    write_run(run, make_losses(5), start=10, ranks=4)
    assert [one.step for one in read_journal(run).evaluations] == [10]
    told = read_journal(run)
    assert [(one.started.step, one.started.world_size) for one in told.starts] == [(0, 1), (10, 4)]
    assert told.last_step == 15


def test_a_new_training_in_an_old_folder_counts_alone(tmp_path: Path) -> None:
    """A start at step 0 takes back all that the file told before."""
    run = write_run(tmp_path / "run", make_losses(30))
    write_run(run, [1.0, 2.0], reason=None)
    told = read_journal(run)
    assert (told.losses(), told.ended, len(told.starts)) == ({1: 1.0, 2: 2.0}, None, 1)


@pytest.mark.parametrize("keep", [1, 30, 200])
def test_a_cut_line_is_left_out(tmp_path: Path, keep: int) -> None:
    """A line that a kill cut off, at the end or in the middle of the file, costs that line only, and is counted."""
    run = write_run(tmp_path / "run", make_losses(20), reason=None)
    path = run / "journal.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-1]) + whole[-1][:keep])
    assert (read_journal(run).last_step, read_journal(run).num_skipped) == (10, 1)
    write_run(run, make_losses(10), start=10)
    told = read_journal(path)
    assert (told.last_step, told.num_skipped, len(told.losses())) == (20, 1, 20)


def test_what_a_newer_version_adds_does_not_hinder(tmp_path: Path) -> None:
    """Kinds and fields that this version does not know are left out silently."""
    run = write_run(tmp_path / "run", make_losses(20))
    path = run / "journal.jsonl"
    lines = [json.loads(line) | {"colour": "blue"} for line in path.read_text().splitlines()]
    lines.insert(1, {"kind": "painted", "time": 0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (len(read_journal(run).losses()), read_journal(run).num_skipped) == (20, 0)


def test_what_is_no_journal_is_said_with_its_reason(tmp_path: Path) -> None:
    """No folder, no file in it, an empty file, no start, and lines without what is needed: each is an error of its own."""
    with pytest.raises(UsageError, match=r"there is no file or folder .*nowhere"):
        read_journal(tmp_path / "nowhere")
    write_run(tmp_path / "runs" / "one", make_losses(3))
    with pytest.raises(UsageError, match=r"runs has no journal.jsonl; there is one in .*one"):
        read_journal(tmp_path / "runs")
    path = tmp_path / "journal.jsonl"
    path.write_text("")
    with pytest.raises(UsageError, match=r"journal.jsonl is empty"):
        read_journal(tmp_path)
    path.write_text("hello\n")
    with pytest.raises(UsageError, match="does not record how the run began"):
        read_journal(path)
    path.write_text('{"kind": "started", "time": 1.0, "step": 0, "world_size": 2}\n')
    with pytest.raises(UsageError, match=r"journal.jsonl:1: 'started' without epoch, global_batch, num_epochs, num_steps"):  # fmt: skip
        read_journal(path)
    path.write_text('{"kind": "ended", "step": "x", "epoch": 0, "reason": "", "is_over": true, "elapsed_s": 1}\n')  # fmt: skip
    with pytest.raises(UsageError, match="of another form"):
        read_journal(path)
    for norms in (None, {"w": 1.0}, {"w": {"w": 1.0}}, [1.0]):
        told = {"kind": "report", "step": 1, "epoch": 0, "loss": 1.0, "losses": [1.0], "lrs": [], "samples": 1, "samples_per_s": 1.0,
                "elapsed_s": 1.0, "eta_s": None, "norms": norms}  # fmt: skip
        path.write_text(json.dumps(told) + "\n")
        with pytest.raises(UsageError, match="of another form"):
            read_journal(path)


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 25), st.integers(1, 7)), min_size=1, max_size=5))
def test_each_step_has_the_loss_of_the_last_start_that_made_it(
    parts: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However often a run goes back, each step's loss is that of the last start that has made the step, and no later step is left."""
    run = tmp_path_factory.mktemp("runs") / "run"
    wanted: dict[int, float] = {}
    for number, (back, num, every) in enumerate(parts):
        start = min(back, max(wanted, default=0))
        write_run(run, [number + step / 1000 for step in range(num)], start=start, every=every, reason=None)
        wanted = {step: loss for step, loss in wanted.items() if step <= start}
        wanted |= {start + 1 + step: number + step / 1000 for step in range(num)}
    assert read_journal(run).losses() == wanted
