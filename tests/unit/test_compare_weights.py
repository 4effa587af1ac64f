"""Two runs' checkpoints compared: which step is taken, and which parameters differ by how much."""

from __future__ import annotations

import math
import re
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from journals import make_losses, write_run
from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint.contents import find_checkpoint
from rankwise.checkpoint.folder import read_contents
from rankwise.cli.main import main
from rankwise.train.comparison.checkpoints import compare_checkpoints
from rankwise.train.comparison.parameters import choose_checkpoints
from rankwise.train.journal import read_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOSSES = make_losses(100)


def save_run(folder: Path, steps: Sequence[int], *, change: float = 0.0, losses: Sequence[float] = LOSSES) -> Path:  # fmt: skip
    """Write a journal and checkpoints of a small model, one weight of it changed."""
    write_run(folder, losses)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].weight[1, 2] += change
    for step in steps:
        checkpoint.save(folder, {"model": model, "note": torch.ones(2) + change}, step=step)
    return folder


@pytest.mark.parametrize(
    ("steps_a", "steps_b", "divergence", "wanted"),
    [
        ((20, 40, 60, 80), (20, 40, 60, 80), 50, [40, 60]),
        ((20, 40, 60, 80), (20, 40, 60, 80), 60, [40, 60]),
        ((20, 40, 60, 80), (20, 40, 60, 80), None, [80]),
        ((20, 60), (20, 40, 80), 50, [20]),
        ((80,), (80, 100), 50, [80]),
        ((20,), (40,), 30, []),
    ],
)
def test_the_checkpoints_around_the_divergence_are_taken(
    tmp_path: Path, steps_a: tuple[int, ...], steps_b: tuple[int, ...], divergence: int | None, wanted: list[int]
) -> None:
    """The last common step before the divergence and the first at or after it are compared; without a divergence the last."""
    runs = [read_journal(save_run(tmp_path / name, steps)) for name, steps in (("a", steps_a), ("b", steps_b))]  # fmt: skip
    assert [step for step, _, _ in choose_checkpoints(runs[0], runs[1], divergence)] == wanted


def test_damaged_and_taken_back_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """A checkpoint with a file cut off does not count, nor one of a step that the run has not reached since it was set back."""
    runs = [save_run(tmp_path / name, (20, 40, 90)) for name in ("a", "b")]
    write_run(runs[1], LOSSES[20:60], start=20)
    (runs[0] / "step-40" / "index.json").write_text("")
    told = [read_journal(run) for run in runs]
    assert [step for step, _, _ in choose_checkpoints(told[0], told[1], None)] == [20]


def test_a_step_that_was_saved_again_counts_as_it_was_saved_last(tmp_path: Path) -> None:
    """Of two checkpoints of one step, the later one is compared: it is what the run went on with."""
    runs = [read_journal(save_run(tmp_path / name, (40,))) for name in ("a", "b")]
    first = runs[1].folder / "step-40"
    shutil.copytree(first, tmp_path / "kept")
    again = checkpoint.save(runs[1].folder, {"value": torch.ones(1)}, step=40).wait()
    # As after a kill between the second save and the deletion of the first.
    (tmp_path / "kept").rename(first)
    assert choose_checkpoints(runs[0], runs[1], None) == [(40, runs[0].folder / "step-40", again)]


def test_the_difference_of_each_tensor_is_measured(tmp_path: Path) -> None:
    """One changed element of a weight is found with its size; equal tensors, and those that are in no module, are not told."""
    a, b = save_run(tmp_path / "a", (20,)), save_run(tmp_path / "b", (20,), change=0.5)
    found = compare_checkpoints(20, a / "step-20", b / "step-20")
    (one,) = found.differing
    weight = checkpoint.read(b)["model"]["0.weight"]
    assert (found.num_common, one.name, one.num_unequal, one.size) == (7, "0.weight", 1, 6)
    assert math.isclose(one.largest, 0.5, rel_tol=1e-6)
    assert math.isclose(one.difference, 0.5 / float(weight.norm()), rel_tol=1e-6)
    assert compare_checkpoints(20, a / "step-20", a / "step-20").differing == ()


def test_tensors_of_all_kinds_are_compared(tmp_path: Path) -> None:
    """Other shapes, dtypes and names, NaN, infinities, zeros and empty tensors: each has a difference that is no NaN."""
    values = {
        "same nan": (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0])),
        "one nan": (torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])),
        "infinite": (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0])),
        "opposite": (torch.tensor([math.inf]), torch.tensor([-math.inf])),
        "shapes": (torch.ones(2, 3), torch.ones(3, 2)),
        "dtypes": (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float64)),
        "complex": (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        "zeros": (torch.zeros(2), torch.tensor([0.0, 3.0])),
        "empty": (torch.zeros(0), torch.zeros(0)),
        "whole": (torch.tensor([1, 2]), torch.tensor([1, 4])),
    }
    for at, name in enumerate("ab"):
        model = nn.Module()
        for key, pair in values.items():
            model.register_buffer(key, pair[at])
        model.register_buffer(f"only {name}", torch.ones(1))
        checkpoint.save(tmp_path / name, {"model": model}, step=1)
    found = compare_checkpoints(1, tmp_path / "a" / "step-1", tmp_path / "b" / "step-1")
    told = {one.name: one.difference for one in found.differing}
    assert {name for name, one in told.items() if one == math.inf} == {"one nan", "opposite", "shapes"}
    finite = {name: round(one, 6) for name, one in told.items() if one < math.inf}
    assert finite == {"infinite": 0.5, "complex": round(math.sqrt(2), 6), "zeros": 1.0, "whole": round(2 / math.sqrt(17), 6)}  # fmt: skip
    assert (found.only_a, found.only_b) == (("only a",), ("only b",))


def test_the_command_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rankwise compare` has a table of the tensors that differ, with the step of the checkpoints."""
    save_run(tmp_path / "a", (40, 60))
    save_run(tmp_path / "b", (40, 60), change=0.5, losses=[*LOSSES[:50], *make_losses(50, seed=4)])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("  step ")] == [["step", "40"], ["step", "60"]]  # fmt: skip
    assert out.count("1 of 7 tensors differ in the checkpoints") == 2
    assert len(re.findall(r"^ +0\.weight ", out, re.MULTILINE)) == 2


def test_several_modules_keep_their_names_apart(tmp_path: Path) -> None:
    """A checkpoint's only module has the names of its parameters, as journals have; of two, each is named with its part."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        parts = {}
        for part in ("one", "two"):
            parts[part] = nn.Module()
            parts[part].register_buffer("w", torch.full((2,), value))
        checkpoint.save(tmp_path / name, parts, step=1)
        checkpoint.save(tmp_path / "single" / name, {"one": parts["one"]}, step=1)
    names = [
        [one.name for one in compare_checkpoints(1, folder / "a" / "step-1", folder / "b" / "step-1").differing]
        for folder in (tmp_path, tmp_path / "single")
    ]
    assert names == [["one.w", "two.w"], ["w"]]


def test_a_damaged_checkpoint_is_a_note_and_changes_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Bytes that changed on the disk are told as a note: the runs agree all the same, by what their journals say."""
    runs = [save_run(tmp_path / name, (40,)) for name in ("a", "b")]
    _, index = read_contents(find_checkpoint(runs[0], 40))
    (chunk,) = index.tensors["model.0.weight"].chunks
    with (runs[0] / "step-40" / chunk.file).open("r+b") as shard:
        shard.seek(chunk.start)
        shard.write(b"\xff")
    with pytest.raises(CheckpointError, match="damaged"):
        compare_checkpoints(40, runs[0] / "step-40", runs[1] / "step-40")
    assert main(["compare", *map(str, runs)]) == 0
    assert "their checkpoints were not compared: " in " ".join(capsys.readouterr().out.split())
