"""`rankwise plan`: what it prints, what it exits with, how it finds a script's model, and that the script runs elsewhere."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import python_forks
from rankwise.base import terminal
from rankwise.cli import plan
from rankwise.cli.main import main

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = """
    import torch
    from torch import nn

    print("imported as", __name__)

    class Net(nn.Sequential):
        pass

    def build_model():
        return Net(*(nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(8)))

    def build_with_values():
        return nn.Dropout(torch.linspace(0, 0.5, 4)[1].item()).append(1)

    def build_by_values():
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(torch.linspace(0, 0.3, 2)[1].item()))

    def build_of(width):
        return nn.Linear(width, width)

    def build_nothing():
        return None

    def make_batch():
        return torch.zeros(64, 512)

    def compute_loss(model, batch):
        return model(batch).square().mean()

    if __name__ == "__main__":
        raise SystemExit("it trains")
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the current folder, whose training must not start."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def call(capfd: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Run the command; return exit code, output and errors, the child's too.

    The child is forked off a Python that has torch: the import takes it longer than all else. One test below starts it as users do.
    """
    run = functools.partial(python_forks.run_code, modules=python_forks.TRAINING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE))  # fmt: skip
        code = main(["plan", *map(str, argv)])
    said = capfd.readouterr()
    return code, said.out, said.err


def call_json(capfd: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    _, out, _ = call(capfd, *argv, "--json")
    told: dict[str, Any] = json.loads(out)
    return told


def test_a_row_for_each_composition_and_the_proposal(capfd: pytest.CaptureFixture[str]) -> None:
    """The table has what each rank holds, an arrow at the cheapest that fits, and the reason below."""
    code, out, err = call(capfd, "train.py", "--gpus", 4, "--memory", "200MB", "--reserve", "1MB", "--batch", "make_batch", "--precision", "fp32")  # fmt: skip
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "Net: 16,797,696 parameters; 8 blocks (0 … 7); optimizer adamw"
    assert lines[1] == "4 ranks, each with 200.0 MiB; 1.0 MiB of it in reserve, 199.0 MiB free"
    rows = {line[3:].split("  ")[0].strip(): line for line in lines[4:]}
    assert rows["DDP"].split()[1:5] == ["64.1", "MiB", "64.1", "MiB"]
    assert rows["DDP"].endswith("too much")
    chosen = [line for line in lines if line.startswith("->")]
    assert len(chosen) == 1
    assert chosen[0].split()[1] == "ZeRO-1"
    assert chosen[0].endswith("fits")
    assert "TP 2 x FSDP 2 + checkpointing" in out
    assert lines[-1].startswith("ZeRO-1, fp32, needs ")


def test_on_a_narrow_terminal_the_parts_stand_below_the_total(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is wider than 80 columns, none is lost, and what paints a line is no character of it."""
    wide = call(capfd, "train.py", "--gpus", "8")[1]
    monkeypatch.setattr(terminal, "width", lambda _fd: 80)
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, narrow, _ = call(capfd, "train.py", "--gpus", "8")
    assert (code, "?[" in narrow) == (0, False)
    plain = terminal.strip_escapes(narrow)
    assert max(map(len, plain.splitlines())) <= 80
    assert {word for word in wide.split() if word.endswith("B")} <= set(plain.replace(",", "").split())


def test_the_training_does_not_start_and_its_prints_are_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """The script is imported under its own name, not __main__, and what it prints goes to standard error."""
    code, out, err = call(capfd, "train.py", "--gpus", 1)
    assert code == 0
    assert "imported as train\n" in err
    assert "imported" not in out
    assert "it trains" not in out + err


def test_the_command_stays_free_of_torch() -> None:
    """The script and torch are imported in another process: the command's own never has torch."""
    code = "import sys; from rankwise.cli.main import main; main(['plan', 'train.py', '--gpus', '1']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False"


def test_json_has_all_that_was_counted(capfd: pytest.CaptureFixture[str]) -> None:
    """As JSON there are bytes for every composition of both precisions, and the number of the proposed one."""
    told = call_json(capfd, "train.py", "--gpus", 16, "--batch", "make_batch", "--loss", "compute_loss")
    assert told["num_parameters"] == 16_797_696
    assert {one["precision"] for one in told["compositions"]} == {"bf16", "bf16-params"}
    assert {"DDP", "ZeRO-1", "HSDP 2 x 8", "FSDP", "TP 8 x FSDP 2"} <= {one["name"] for one in told["compositions"]}
    assert told["compositions"][told["proposal"]]["name"] == "DDP"
    for one in told["compositions"]:
        assert one["memory"]["total"] == sum(size for name, size in one["memory"].items() if name != "total")


def test_inputs_by_shape_are_a_batch(capfd: pytest.CaptureFixture[str]) -> None:
    """`--input 64,512` tells as much as a function that makes such a batch, and --micro-batch changes its size."""
    argv = ("train.py", "--gpus", 2, "--precision", "fp32")
    by_shape, by_function = (call_json(capfd, *argv, *more)["compositions"] for more in (("--input", "64,512"), ("--batch", "make_batch")))  # fmt: skip
    assert by_shape == by_function
    twice = call_json(capfd, *argv, "--input", "64,512:float32", "--micro-batch", 128)["compositions"]
    assert twice[0]["memory"]["activations"] == 2 * by_shape[0]["memory"]["activations"]


def test_where_nothing_fits_the_exit_code_is_1(capfd: pytest.CaptureFixture[str]) -> None:
    """Scripts can ask: 1 means that nothing fits, and the reason says what would."""
    code, out, _ = call(capfd, "train.py", "--gpus", 1, "--memory", "40MB", "--reserve", "1MB", "--optimizer", "sgd")
    assert code == 1
    assert "->" not in out
    assert "nothing fits into the 39.0 MiB that are free on the GPU" in out
    assert "ranks would do, with FSDP" in out


def test_without_a_batch_it_only_may_fit(capfd: pytest.CaptureFixture[str]) -> None:
    """What was not counted is a question mark, and no promise is made."""
    _, out, _ = call(capfd, "train.py", "--gpus", 2)
    row = next(line for line in out.splitlines() if line.startswith("->"))
    assert "?" in row
    assert row.endswith("may fit")
    assert "Note: activations are not counted" in out


def test_a_module_and_its_function(capfd: pytest.CaptureFixture[str]) -> None:
    """package.module:function is found from the current folder, as `python -m` finds it."""
    Path("models").mkdir()
    Path("models/__init__.py").write_text("")
    Path("models/net.py").write_text("from torch import nn\n\ndef small():\n    return nn.Linear(3, 3)\n")
    assert call_json(capfd, "models.net:small", "--gpus", 1)["num_parameters"] == 12


def test_a_builder_that_looks_at_values_can_allocate(capfd: pytest.CaptureFixture[str]) -> None:
    """On the meta device tensors have no values; the error names the flag that builds the model for real, and it works."""
    code, _, err = call(capfd, "train.py", "--gpus", 1, "--call", "build_by_values")
    assert code == 2
    assert "build_by_values() raised" in err
    assert "--allocate" in err
    assert call_json(capfd, "train.py", "--gpus", 1, "--call", "build_by_values", "--allocate")["num_parameters"] == 20


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["absent.py"], ["there is no file absent.py"]),
        (["train.py", "--call", "nothing"], ["train has no function 'nothing'; its functions are build_model, build_with_values"]),
        (["train.py", "--call", "build_of"], ["build_of() of train needs width"]),
        (["train.py", "--call", "build_nothing"], ["returned NoneType, not a torch.nn.Module"]),
        (["train.py", "--call", "build_with_values"], ["build_with_values() raised", "--allocate"]),
        (["train.py", "--input", "8,x"], ["'8,x' is not a shape"]),
        (["train.py", "--input", "8:number"], ["torch has no dtype 'number'"]),
        (["train.py", "--input", "8,3"], ["can't be followed without values", "is the batch what the model is called with?"]),
        (["train.py", "--optimizer", "adamx"], ["there is no optimizer 'adamx'"]),
        (["train.py", "--memory", "much"], ["'much' is not a size of memory"]),
    ],
    ids=lambda value: " ".join(value)[:30],
)  # fmt: skip
def test_what_cannot_be_planned_is_told_in_a_line(argv: list[str], words: list[str], capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Each error names what is wrong and what would be right, and nothing stands on standard output."""
    code, out, err = call(capfd, *argv, "--gpus", 1)
    told = err[err.index("rankwise: ") :]
    assert code in {1, 2}
    assert not out
    assert all(word in told for word in words), told


def test_a_script_of_several_builders_or_none_lists_its_functions(capfd: pytest.CaptureFixture[str]) -> None:
    """Which function builds the model is never guessed: the error lists those that there are, before torch is imported."""
    Path("none.py").write_text("def net(): ...\ndef train(): ...\n")
    Path("two.py").write_text("def get_model(): ...\ndef make_model(): ...\n")
    Path("bad.py").write_text("def (:\n")
    Path("empty.py").write_text("")
    for name, words in (
        (
            "none.py",
            "has none of build_model, make_model, get_model, create_model; its functions are net, train",
        ),
        ("two.py", "has make_model and get_model; its functions are get_model, make_model"),
        ("empty.py", "has none of build_model, make_model, get_model, create_model; it defines no function"),
        ("bad.py", "bad.py is not valid Python"),
    ):
        code, _, err = call(capfd, name, "--gpus", 1)
        assert code == 2
        assert words in err
    assert "--gpus 0: at least one is needed" in call(capfd, "two.py", "--gpus", 0)[2]


def test_a_script_without_a_guard_is_told_to_have_one(capfd: pytest.CaptureFixture[str]) -> None:
    """A script that reads its arguments while it is imported ends there; the error says how to keep it from that."""
    Path("bare.py").write_text("import sys\ndef build_model(): ...\nsys.exit(3)\n")
    code, _, err = call(capfd, "bare.py", "--gpus", 1)
    assert code == 2
    assert "importing bare.py ended the process with SystemExit(3)" in err
    assert "__main__" in err
    Path("dead.py").write_text("import os\ndef build_model(): ...\nos._exit(7)\n")
    code, _, err = call(capfd, "dead.py", "--gpus", 1)
    assert code == 1
    assert "the process that imports dead.py ended with exit code 7" in err
