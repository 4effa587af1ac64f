"""One changed byte anywhere is noticed: ``verify`` names the file, ``load`` takes the checkpoint before, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rankwise import checkpoint
from rankwise.base.errors import CheckpointError
from rankwise.checkpoint import folder as folders
from rankwise.checkpoint.manifest import INDEX, MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable

SHARD = "shard-00000.safetensors"


def make_state(step: int) -> dict[str, Any]:
    return {"a": torch.full((5,), float(step)), "b": torch.full((3,), step), "n": step}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        checkpoint.save(folder, make_state(step), step=step)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(saved, tmp_path / "runs")


def flip(path: Path, place: int) -> None:
    """Change one bit of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def places_of_tensors(path: Path) -> list[tuple[str, int, int]]:
    """Where each tensor of a shard lies."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    return [(name, 8 + size + one["data_offsets"][0], one["data_offsets"][1] - one["data_offsets"][0]) for name, one in head.items() if name[0] != "_"]  # fmt: skip


def check_fall_back(folder: Path, named: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The damaged step 2 is told by verify, passed over by load with a warning, and refused if asked for."""
    assert checkpoint.verify(folder / "step-1") == []
    problems = checkpoint.verify(folder / "step-2")
    assert problems
    assert named in problems[0]
    state = make_state(0)
    assert checkpoint.load(folder, state) == 1
    assert torch.equal(state["a"], make_state(1)["a"])
    assert state["n"] == 1
    told = capfd.readouterr().err
    assert "warning: skipped" in told
    assert named in told
    with pytest.raises(CheckpointError, match="step-2"):
        checkpoint.load(folder, make_state(0), step=2)


@pytest.mark.parametrize("place", [0, 1, 13, 20, 21, 22, 23, 40, 200, -1, -2, -4])
def test_a_flipped_bit_of_the_manifest(folder: Path, capfd: pytest.CaptureFixture[str], place: int) -> None:
    """Braces, checksum, fields and white space of the manifest are all under its checksum."""
    flip(folder / "step-2" / MANIFEST, place)
    check_fall_back(folder, MANIFEST, capfd)


@pytest.mark.parametrize("place", [0, 15, 22, 100, -30, -1])
def test_a_flipped_bit_of_the_index(folder: Path, capfd: pytest.CaptureFixture[str], place: int) -> None:
    """The index is under its own checksum, and under the manifest's."""
    flip(folder / "step-2" / INDEX, place)
    check_fall_back(folder, INDEX, capfd)


def test_a_flipped_bit_of_a_tensor(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first and the last byte of each tensor are under its checksum; the error names tensor and file."""
    shard = folder / "step-2" / SHARD
    for name, start, size in places_of_tensors(shard):
        for place in {start, start + size - 1} if size else ():
            flip(shard, place)
            problems = checkpoint.verify(folder / "step-2")
            assert len(problems) == 1
            assert f"{SHARD}: {name} is damaged" in problems[0]
            if name in {"a", "b"}:
                check_fall_back(folder, f"{name} is damaged", capfd)
            flip(shard, place)
    assert checkpoint.verify(folder) == []


@pytest.mark.parametrize("place", [0, 7, 8, 30])
def test_a_flipped_bit_of_a_shards_head(folder: Path, place: int) -> None:
    """The head of a shard is for other programs: damage in it does not hinder us, but ``verify`` names it."""
    flip(folder / "step-2" / SHARD, place)
    assert any(f"{SHARD}: the first" in problem for problem in checkpoint.verify(folder / "step-2"))
    assert checkpoint.load(folder, make_state(0)) == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def take_from_the_other_step(path: Path) -> None:
    shutil.copy(path.parents[1] / "step-1" / path.name, path)


def make_a_folder_of_it(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", [MANIFEST, INDEX, SHARD])
@pytest.mark.parametrize("harm", [cut, empty, extend, Path.unlink, make_a_folder_of_it, take_from_the_other_step])
def test_a_file_that_is_not_the_right_one(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, harm: Callable[[Path], None]
) -> None:
    """A file that is cut, empty, longer, missing, no file or of another step is named, and the step passed over."""
    harm(folder / "step-2" / name)
    if name == MANIFEST and harm is take_from_the_other_step:
        # The manifest of step 1 says that this is step 1: its index is not the one that lies here.
        assert INDEX in checkpoint.verify(folder / "step-2")[0]
        state = make_state(0)
        assert checkpoint.load(folder, state) == 1
        assert state["n"] == 1
        return
    check_fall_back(folder, SHARD if name == SHARD else name, capfd)


def test_files_that_are_too_many_harm_nobody(folder: Path) -> None:
    """What others put beside the files, and folders that look like checkpoints, change nothing."""
    (folder / "step-2" / "notes.txt").write_text("hello")
    (folder / "step-3").write_text("a file")
    (folder / "step-4").mkdir()
    (folder / "step-x").mkdir()
    (folder / "step-9.tmp-00ff").mkdir()
    assert checkpoint.latest(folder) == folder / "step-2"
    assert checkpoint.load(folder, make_state(0)) == 2


def test_with_all_damaged_it_raises(folder: Path) -> None:
    """If none is whole, beginning anew in silence would be wrong: the error names what is damaged."""
    for step in (1, 2):
        flip(folder / f"step-{step}" / MANIFEST, 30)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete") as caught:
        checkpoint.load(folder, make_state(0))
    assert "step-1" in str(caught.value)
    assert "step-2" in str(caught.value)
    assert checkpoint.latest(folder) is None


def test_with_all_bytes_of_tensors_damaged_it_raises(folder: Path) -> None:
    """If reading is what finds the damage, the error names all that were tried."""
    for step in (1, 2):
        shard = folder / f"step-{step}" / SHARD
        flip(shard, next(start for name, start, _ in places_of_tensors(shard) if name == "a"))
    with pytest.raises(CheckpointError, match=r"can be loaded: .*step-2.*step-1"):
        checkpoint.load(folder, make_state(0))


def test_a_later_format_is_told(folder: Path) -> None:
    """A checkpoint of a later version of the format is no damage: nothing older is loaded in its place, and nothing is saved beside it.

    Its step counts as lost otherwise, and its serial would be given a second time.
    """
    from rankwise.checkpoint.manifest import dump

    path = folder / "step-2" / MANIFEST
    content = json.loads(path.read_bytes())
    del content["crc32"]
    path.write_bytes(dump({**content, "version": 2}))
    with pytest.raises(CheckpointError, match="has version 2 of the format; this rankwise reads version 1"):
        checkpoint.load(folder, make_state(0), step=2)
    for go_on in (
        lambda: checkpoint.load(folder, make_state(0)),
        lambda: checkpoint.save(folder, make_state(3), step=3),
    ):
        with pytest.raises(CheckpointError, match="has version 2 of the format") as caught:
            go_on()
        assert "install the rankwise that wrote it" in str(caught.value)
    assert checkpoint.load(folder, make_state(0), step=1) == 1
    assert not [path for path in folder.iterdir() if "step-3" in path.name]


def test_a_checkpoint_that_vanishes_while_it_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job's retention may delete a checkpoint between our looks: the one that is left is loaded."""
    look = folders.open_checkpoint

    def look_and_lose(path: Path) -> Any:
        found = look(path)
        if Path(path).name == "step-2" and Path(path).exists():
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(folders, "open_checkpoint", look_and_lose)
    assert checkpoint.load(folder, make_state(0)) == 1
