"""`rankwise checkpoint`: what it shows, what it exits with, and that three of its commands need no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rankwise import checkpoint
from rankwise.base.errors import CheckpointError, UsageError
from rankwise.checkpoint.contents import find_checkpoint
from rankwise.checkpoint.convert import import_file
from rankwise.cli.main import main
from rankwise.doctor.units import align, format_bytes

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 5 and 10."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2).to(torch.bfloat16))
    state = {"model": model, "epoch": 3, "note": {"seen": torch.arange(6), "who": ("a", 1)}}
    checkpoint.save(tmp_path / "run", state, step=5, metrics={"loss": 0.25})
    checkpoint.save(tmp_path / "run", state, step=10)
    return tmp_path / "run"


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Run a command; return exit code, output and errors."""
    code = main(["checkpoint", *map(str, argv)])
    said = capsys.readouterr()
    return code, said.out, said.err


def flip(path: Path, place: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def tell_shard(one: Path) -> Path:
    return next(one.glob("shard-*"))


# ---------------------------------------------------------------------- ls


def test_ls_shows_the_latest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each checkpoint has a line with its size, ranks, time, metrics and state."""
    code, out, err = call(capsys, "ls", folder)
    heads, first, second = out.splitlines()
    assert (code, err) == (0, "")
    assert heads.split() == ["name", "size", "ranks", "saved", "at", "metrics", "state"]
    assert first.startswith("step-10 ")
    assert second.startswith("step-5 ")
    assert second.endswith("loss=0.25  complete")


def test_ls_shows_damage_and_leftovers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut file and a lost manifest are damage with their cause; what a killed job left is half written and no damage."""
    (folder / "step-20.tmp-0123456789abcdef").mkdir()
    code, out, _ = call(capsys, "ls", folder)
    assert code == 0
    assert out.splitlines()[-1].split() == ["step-20.tmp-0123456789abcdef", "-", "-", "-", "half", "written"]
    shard = tell_shard(folder / "step-10")
    with shard.open("r+b") as file:
        file.truncate(100)
    (folder / "step-5" / "manifest.json").unlink()
    code, out, _ = call(capsys, "ls", folder)
    assert code == 1
    assert f"damaged: {shard} has 100 bytes, not " in out
    assert f"damaged: can't read {folder / 'step-5' / 'manifest.json'}: No such file" in out


def test_ls_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get the same facts, with sizes in bytes."""
    (folder / "step-20.tmp-0123456789abcdef").mkdir()
    code, out, _ = call(capsys, "ls", folder, "--format", "json")
    latest, first, unfinished = json.loads(out)["checkpoints"]
    assert code == 0
    assert (latest["step"], latest["state"], latest["problem"]) == (10, "complete", None)
    assert (first["metrics"], first["ranks"]) == ({"loss": 0.25}, 1)
    sizes = sum(path.stat().st_size for path in (folder / "step-5").iterdir() if path.name != "manifest.json")
    assert first["size_bytes"] == sizes
    assert (unfinished["step"], unfinished["state"]) == (20, "half written")


# ------------------------------------------------------------------ inspect


def test_inspect_lists_parts_and_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest, each part with what it holds, each tensor with dtype, shape, bytes, chunks, files; and the sums."""
    code, out, _ = call(capsys, "inspect", folder, "--step", 5)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert f"checkpoint {folder / 'step-5'}" in lines
    assert "metrics loss=0.25" in lines
    assert "model module 4 196 0" in lines  # (4 x 8 + 8) x 4 bytes and (8 x 2 + 2) x 2
    assert "note value 1 48 2" in lines
    assert "model.0.weight float32 [8, 4] 128 1 1" in lines
    assert "model.1.bias bfloat16 [2] 4 1 1" in lines
    assert lines[-1].startswith("total ")


def test_inspect_of_one_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--part leaves the others out, also in JSON; the sum is that part's."""
    _, out, _ = call(capsys, "inspect", folder, "--part", "note")
    assert out.splitlines()[-1].split() == ["total", "1", "tensor", "48", "1", "1"]
    _, out, _ = call(capsys, "inspect", folder, "--part", "note", "--format", "json")
    told = json.loads(out)
    assert told["step"] == 10
    assert [part["others"] for part in told["parts"]] == [["who.0", "who.1"]]
    assert [(one["name"], one["dtype"], one["shape"], one["size_bytes"]) for one in told["tensors"]] == [
        ("note.seen", "int64", [6], 48)
    ]


def test_bytes_of_arrays_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy's arrays lie among the tensors as bytes, and are shown."""
    np = pytest.importorskip("numpy")
    checkpoint.save(tmp_path, {"buffer": {"seen": np.zeros(5), 7: [1.5]}}, step=0, rng=False)
    _, out, _ = call(capsys, "inspect", tmp_path)
    assert [" ".join(line.split()) for line in out.splitlines()[-2:]] == [
        "buffer.seen uint8 [40] 40 1 1",
        "total 1 tensor 40 1 1",
    ]


# ------------------------------------------------------------------- verify


def test_verify_reads_every_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One changed bit among the tensors, which no size shows, is found, with file and tensor; ls can't know of it."""
    code, out, _ = call(capsys, "verify", folder)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == ["complete", "complete"]
    shard = tell_shard(folder / "step-5")
    flip(shard, shard.stat().st_size - 1)
    assert call(capsys, "ls", folder)[0] == 0
    code, out, _ = call(capsys, "verify", folder)
    whole, damaged, problem = out.splitlines()
    assert code == 1
    assert whole.startswith(f"{folder / 'step-10'}  complete (")
    assert damaged == f"{folder / 'step-5'}  damaged"
    assert problem.startswith(f"  {shard}: ")
    assert " is damaged (bytes " in problem


@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_verify_finds_damage_in_each_json_file(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """A changed bit in one of the two JSON files is damage of that file, in text and JSON alike."""
    flip(folder / "step-10" / name, -10)
    code, out, _ = call(capsys, "verify", folder / "step-10", "--format", "json")
    (told,) = json.loads(out)["checkpoints"]
    assert code == 1
    assert told["state"] == "damaged"
    assert name in told["problems"][0]


def test_a_checkpoint_without_manifest_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is named like a checkpoint and has no manifest is told as such, not as an empty folder."""
    (folder / "step-10" / "manifest.json").unlink()
    code, out, _ = call(capsys, "verify", folder / "step-10")
    assert code == 1
    assert "manifest.json: No such file" in out
    assert "manifest.json: No such file" in call(capsys, "inspect", folder / "step-10")[2]
    assert call(capsys, "inspect", folder)[0] == 0, "the one before it is whole"


# --------------------------------------------------------- export and import


def test_weights_go_out_and_come_in(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What export wrote, import makes a checkpoint of, which load() gives to the model."""
    file, new = tmp_path / "model.safetensors", tmp_path / "new"
    code, out, err = call(capsys, "export", folder, file)
    assert (code, err) == (0, "")
    assert out == f"{file}  {format_bytes(file.stat().st_size)}\n"
    code, out, _ = call(capsys, "import", file, new, "--step", 7)
    assert code == 0
    assert out.startswith(f"{new / 'step-7'}  ")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2).to(torch.bfloat16))
    assert checkpoint.load(new, {"model": model}) == 7
    saved = checkpoint.read(folder)["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_import_never_becomes_a_runs_latest(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Into a folder that a run resumes from nothing is imported."""
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pt")
    code, _, err = call(capsys, "import", tmp_path / "w.pt", folder)
    assert code == 2
    assert "has checkpoints already, the latest of step 10" in err
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-10", "step-5"]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["ls", "{tmp}/none"], 1, "there is no folder {tmp}/none"),
        (["ls", "{tmp}/file"], 1, "can't list {tmp}/file: Not a directory"),
        (["inspect", "{tmp}/none"], 1, "there is no folder {tmp}/none"),
        (["inspect", "{tmp}/file"], 1, "file is not a folder"),
        (["inspect", "{run}", "--step", "6"], 1, "holds no checkpoint of step 6; it has 10, 5"),
        (["inspect", "{run}", "--part", "modle"], 1, "has no part 'modle'; it has epoch, model, note, rng"),
        (["verify", "{tmp}/none"], 1, "there is no folder {tmp}/none"),
        (["verify", "{tmp}/step-3"], 1, "there is no folder {tmp}/step-3"),
        (["export", "{run}", "{tmp}/x", "--part", "modle"], 1, "no part 'modle'; with tensors it has model, note"),
        (["export", "{run}", "{tmp}/x", "--part", "epoch"], 1, "holds no tensors"),
        (["export", "{run}", "{tmp}/x", "--part", "rng"], 1, "each rank has saved its own 'rng'"),
        (["export", "{run}", "{tmp}/none/x"], 1, "there is no folder"),
        (["export", "{run}", "{tmp}"], 1, "it is a folder"),
        (["import", "{tmp}/none.pt", "{tmp}/new"], 1, "none.pt: No such file or directory"),
        (["import", "{tmp}/file", "{tmp}/new"], 1, "can't be read by torch.load"),
        (["import", "{tmp}/file", "{tmp}/new", "--step", "x"], 2, "--step 'x' is not a whole number"),
        (["ls"], 2, "required: FOLDER"),
        (["list", "{run}"], 2, "'list' is none of ls, inspect"),
        (["ls", "{run}", "--fromat", "json"], 2, "unrecognized arguments: --fromat json"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    folder: Path, tmp_path: Path, argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with path or command is one error, on the error stream, with the right exit code."""
    (tmp_path / "file").write_text("some text")
    names = {"tmp": str(tmp_path), "run": str(folder)}
    got, out, err = call(capsys, *(word.format(**names) for word in argv))
    assert (got, out) == (code, "")
    assert err.count("rankwise: ") == 1
    assert said.format(**names) in err
    assert not (tmp_path / "new").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command there is the list of them and exit code 2; with --help the same and 0."""
    assert call(capsys)[0] == 2
    with pytest.raises(SystemExit) as end:
        main(["checkpoint", "--help"])
    assert end.value.code == 0
    assert "verify" in capsys.readouterr().out


def test_find_checkpoint_passes_over_the_damaged(folder: Path) -> None:
    """The latest that is whole is meant; one that is asked for by its step is never replaced by another."""
    with tell_shard(folder / "step-10").open("r+b") as file:
        file.truncate(8)
    assert find_checkpoint(folder).step == 5
    with pytest.raises(CheckpointError, match="has 8 bytes, not"):
        find_checkpoint(folder, 10)


# ---------------------------------------------------------------- no torch


def run_without_torch(tmp_path: Path, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a Python where importing torch or NumPy fails."""
    stubs = tmp_path / "stubs"
    for name in ("torch", "numpy"):
        (stubs / name).mkdir(parents=True, exist_ok=True)
        (stubs / name / "__init__.py").write_text(f'raise ModuleNotFoundError("No module named {name!r}")\n')
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stubs), str(SOURCE)])}
    command = [sys.executable, "-m", "rankwise", "checkpoint", *map(str, argv)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", [["ls"], ["inspect"], ["verify"], ["verify", "--format", "json"]])
def test_looking_needs_no_torch(folder: Path, tmp_path: Path, command: list[str]) -> None:
    """ls, inspect and verify run where torch can't be imported: on a login node, or on a laptop."""
    done = run_without_torch(tmp_path, *command, folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step-10" in done.stdout


def test_export_says_that_it_needs_torch(folder: Path, tmp_path: Path) -> None:
    """Where a command can't do without torch, that is the error, and no traceback."""
    done = run_without_torch(tmp_path, "export", folder, tmp_path / "x.safetensors")
    assert done.returncode == 2
    assert "needs torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    """A pipe whose reader is gone, as behind `| head`, ends the command without a traceback."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "rankwise", "checkpoint", "inspect", str(folder)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


# ------------------------------------------------------------------ columns


def test_columns() -> None:
    """Numbers stand below each other, and no line ends in spaces."""
    assert align([["a", "1"], ["bcd", "22"]], right={1}) == ["a     1", "bcd  22"]
    assert align([["a", ""], ["b", "c"]]) == ["a", "b  c"]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 62, "4096.0 PiB")]
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    """Bytes stay exact; above, one decimal and the largest unit that gives 1 or more."""
    assert format_bytes(size) == text


def test_a_step_that_is_none_is_a_wrong_command(tmp_path: Path) -> None:
    """A negative step is refused as save() refuses it."""
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="step=-1"):
        import_file(tmp_path / "w.pt", tmp_path / "new", step=-1)
