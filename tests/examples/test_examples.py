"""The examples do what they say: run as a reader would, and compared with one process that nobody disturbs."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from rankwise import checkpoint
from rankwise.testing import run_ranks, try_ranks
from rankwise.train.journal import Journal, read_journal
from support import Running, run_rankwise

EXAMPLES = Path(__file__).parents[2] / "examples"
#: In float64 other orders of summation cost 1e-16 at each step; a few dozen steps of training make it 1e-12 at most.
TOLERANCE = 1e-9
NUM_STEPS = 14
#: A GPT that takes milliseconds for a step; two micro-batches a rank at three ranks, one more where there are fewer.
TINY = ("--layers", "1", "--width", "16", "--heads", "2", "--context", "32", "--global-batch", "9", "--micro-batch", "2",
        "--every", "4", "--write", "0", "--steps", str(NUM_STEPS), "--text", str(EXAMPLES / "gpt" / "data.py"))  # fmt: skip
GPT_FORMS = ("train.py", "train_trainer.py")
DIGITS_FORMS = ("batchnorm.py", "batchnorm_trainer.py")


def run_example(script: str, *args: str) -> str:
    """Run an example in this rank as ``python script args`` would, in float64, and return what it printed."""
    path, printed = EXAMPLES / script, io.StringIO()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # ranks that share two cores would wait for each other's threads
    sys.modules["matplotlib"] = None  # type: ignore[assignment] - to draw the curves would take most of the time
    sys.argv, sys.path[0:0] = [str(path), *args], [str(path.parent)]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def check_same(first: Journal, second: Journal, num_steps: int) -> None:
    """Both runs have had the same loss at every step, and the same evaluations."""
    losses, others = first.losses(), second.losses()
    assert sorted(losses) == sorted(others) == list(range(1, num_steps + 1))
    assert others == pytest.approx(losses, rel=TOLERANCE)
    assert losses[num_steps] < 0.95 * losses[1]  # it has learned something
    assert second.lrs() == pytest.approx(first.lrs(), rel=TOLERANCE)
    evaluations = {one.step: dict(one.metrics) for one in first.evaluations}
    assert evaluations.keys() == {one.step for one in second.evaluations}
    for one in second.evaluations:
        assert dict(one.metrics) == pytest.approx(evaluations[one.step], rel=TOLERANCE)


def test_gpt_windows_cover_the_library_once() -> None:
    """Each byte but the first of a file is a target once, behind the byte that it follows; no window reaches into the next file."""
    load_windows = runpy.run_path(str(EXAMPLES / "gpt" / "data.py"))["load_windows"]
    train, held_out = load_windows(4096)
    num_targets = 0
    for windows in (train, held_out):
        for index in range(len(windows)):
            inputs, targets = windows[index]
            count = int((targets != -100).sum())
            assert torch.equal(inputs[1:count], targets[: count - 1])
            assert (targets[count:] == -100).all()
            num_targets += count
    sources = [path.read_bytes() for path in Path(sysconfig.get_path("stdlib")).glob("*.py")]
    assert num_targets == sum(max(0, len(source) - 1) for source in sources)
    assert 0.01 < len(held_out) / len(train) < 0.2


def test_gpt_evaluates_on_as_many_windows_as_asked() -> None:
    """The first of those that are held out are taken, and the windows to train on stay as they are."""
    load_windows = runpy.run_path(str(EXAMPLES / "gpt" / "data.py"))["load_windows"]
    for file in (None, EXAMPLES / "gpt" / "data.py"):
        train, held_out = load_windows(32, file=file)
        same, some = load_windows(32, file=file, num_held_out=3)
        assert len(same) == len(train)
        assert len(some) == min(3, len(held_out))
        assert all(torch.equal(some[index][0], held_out[index][0]) for index in range(len(some)))


@pytest.mark.parametrize(
    ("script", "args"),
    [
        *((f"gpt/{form}", TINY) for form in GPT_FORMS),
        *((f"digits/{form}", ("--epochs", "1")) for form in (*DIGITS_FORMS, "train_trainer.py")),
    ],
)
def test_a_finished_folder_is_named(script: str, args: tuple[str, ...], tmp_path: Path) -> None:
    """Started again after its end, a training says on rank 0 that its folder is finished, and does no step; the first time it does not."""
    folder, said = tmp_path / "run", f"{tmp_path / 'run'} is finished: delete it to train anew"
    args = (*args, "--folder", str(folder))
    [first] = run_ranks(run_example, 1, script, *args)
    losses = read_journal(folder).losses()
    again = run_ranks(run_example, 2, script, *args)
    assert said not in first
    assert [said in printed for printed in again] == [True, False]
    assert read_journal(folder).losses() == losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train the GPT in both forms on one process that nobody disturbs; give the folders."""
    folder = tmp_path_factory.mktemp("whole")
    for form in GPT_FORMS:
        run_ranks(run_example, 1, f"gpt/{form}", *TINY, "--folder", str(folder / form))
    return {form: folder / form for form in GPT_FORMS}


@pytest.mark.parametrize(("form", "kill_at"), [("train.py", 7), ("train_trainer.py", 10)])
def test_gpt_killed_and_resumed_is_undisturbed(form: str, kill_at: int, whole: dict[str, Path], tmp_path: Path) -> None:
    """Killed with -9 on two ranks and started again on three, the GPT goes the way of one process, step by step."""
    args = (f"gpt/{form}", *TINY, "--folder", str(tmp_path / "run"), "--kill-at", str(kill_at))
    killed = try_ranks(run_example, 2, *args)
    assert killed[1].exit_code == -9
    latest = checkpoint.latest(tmp_path / "run")
    assert latest is not None
    saved = int(latest.name.removeprefix("step-"))
    assert 4 <= saved <= kill_at  # a save in the background may have been killed too
    run_ranks(run_example, 3, *args)
    resumed = read_journal(tmp_path / "run")
    assert [(one.started.step, one.started.world_size) for one in resumed.starts] == [(0, 2), (saved, 3)]
    check_same(read_journal(whole[form]), resumed, NUM_STEPS)


@pytest.mark.parametrize(
    ("form", "ways"),
    [
        ("train.py", [("fsdp", 2), ("tp-fsdp", 4)]),
        ("train.py", [("tp", 2), ("ddp", 3)]),
        ("train_trainer.py", [("zero1", 2), ("hsdp", 4)]),
        ("train_trainer.py", [("offload", 2), ("tp", 2)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(how for how, _ in value),
)
def test_gpt_spread_is_one_training(
    form: str, ways: list[tuple[str, int]], whole: dict[str, Path], tmp_path: Path
) -> None:
    """Killed in one composition and resumed in another, the GPT goes the way of one process: losses, clipping, evaluations."""
    args = (f"gpt/{form}", *TINY, "--folder", str(tmp_path / "run"), "--spread")
    (how, world_size), (other, other_size) = ways
    try_ranks(run_example, world_size, *args, how, "--kill-at", "10")
    run_ranks(run_example, other_size, *args, other)
    resumed = read_journal(tmp_path / "run")
    assert [one.started.world_size for one in resumed.starts] == [world_size, other_size]
    assert resumed.starts[1].started.step >= 4
    check_same(read_journal(whole[form]), resumed, NUM_STEPS)
    assert resumed.grad_norms() == pytest.approx(read_journal(whole[form]).grad_norms(), rel=TOLERANCE)


def test_gpt_forms_are_one_training(whole: dict[str, Path]) -> None:
    """The plain loop and the Trainer make the same GPT, to rounding."""
    first, second = (read_journal(whole[form]) for form in GPT_FORMS)
    check_same(first, second, NUM_STEPS)
    assert second.grad_norms() == pytest.approx(first.grad_norms(), rel=TOLERANCE)
    weights, others = (checkpoint.read(whole[form])["model"] for form in GPT_FORMS)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("form", GPT_FORMS)
def test_gpt_by_command_survives_a_kill(form: str, tmp_path: Path) -> None:
    """By command: rank 1 is killed with -9, the launcher starts both again, the training ends, and text is written."""
    # At step 8 the save of step 4 has been waited for, even where it was made in the background.
    options = ["--kill-at", "10", "--write", "20", "--prompt", "import ", "--folder", str(tmp_path / "run")]
    result = run_rankwise(
        ["--nproc-per-node", "2", "--max-restarts", "1", str(EXAMPLES / "gpt" / form), *TINY, *options],
        tmp_path,
    )
    assert result.code == 0, result.err
    assert "import " in result.out
    assert len(read_journal(tmp_path / "run").starts) == 2


def test_the_demo_by_the_trainer_reads_digits(tmp_path: Path) -> None:
    """One rank and two have the same losses and the same accuracy, above nine tenths after three epochs."""
    runs = []
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        args = ("--epochs", "3", "--folder", str(folder))
        printed = run_ranks(run_example, world_size, "digits/train_trainer.py", *args)
        runs.append((printed[0].splitlines()[-1], read_journal(folder)))
    assert runs[0][0] == runs[1][0]
    assert "accuracy 0.9" in runs[0][0]
    check_same(runs[0][1], runs[1][1], runs[0][1].last_step)


def test_batchnorm_is_one_training(tmp_path: Path) -> None:
    """BatchNorm, early stop and the best checkpoint depend neither on the number of ranks nor on the form."""
    journals: list[Journal] = []
    for form in DIGITS_FORMS:
        last_lines = set()
        for world_size in (1, 2):
            folder = tmp_path / f"{form}{world_size}"
            args = ("--epochs", "12", "--patience", "1", "--folder", str(folder))
            printed = run_ranks(run_example, world_size, f"digits/{form}", *args)
            last_lines.add(printed[0].splitlines()[-1])
            journals.append(read_journal(folder))
        assert len(last_lines) == 1
        assert "accuracy 0.9" in last_lines.pop()
    first, num_steps = journals[0], journals[0].last_step
    assert 2 * 30 <= num_steps < 12 * 30  # stopped early: the last epoch was no better
    for journal in journals:
        check_same(first, journal, num_steps)
        assert [evaluated.is_best for evaluated in journal.evaluations][-2:] == [True, False]
    for form in DIGITS_FORMS:
        kept = {found.step for found in checkpoint.list_checkpoints(tmp_path / f"{form}2")}
        assert num_steps - 30 in kept  # the best


@pytest.mark.parametrize("script", ["torch_only.py", "plain_loop.py", "with_trainer.py"])
def test_tutorial_by_command_and_by_function(script: str, tmp_path: Path) -> None:
    """Each script of the tutorial runs under the launcher, starts its ranks itself, and goes on where it was saved."""
    path = str(EXAMPLES / "tutorial" / script)
    options = ["--folder", "run", "--max-epochs"]
    first = run_rankwise(["--nproc-per-node", "2", path, *options, "2"], tmp_path)
    assert first.code == 0, first.err
    second = Running([sys.executable, path, "--nprocs", "2", *options, "4"], tmp_path).finish()
    assert second.code == 0, second.err
    losses = read_losses(script, tmp_path / "run", first.out + second.out)
    assert len(losses) == 4  # none of them twice
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(21.4, abs=0.1)  # as without ranks
    third = run_rankwise(["--nproc-per-node", "1", path, *options, "4"], tmp_path)
    said = "run is finished: delete it to train anew"
    assert [said in result.out for result in (first, second, third)] == [False, False, True]


def read_losses(script: str, folder: Path, printed: str) -> list[float]:
    """Return the mean loss of each epoch."""
    if script != "with_trainer.py":
        return [float(line.rpartition("loss ")[2]) for line in printed.splitlines() if " loss " in line]
    losses = list(read_journal(folder).losses().values())
    return [sum(losses[start : start + 16]) / 16 for start in range(0, len(losses), 16)]
