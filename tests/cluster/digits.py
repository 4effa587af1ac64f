"""The digits example as a job of any cluster: stopped there by a notice, and resumed on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cluster.commands import call
from support import write_script

_DIGITS = Path(__file__).parents[2] / "examples" / "digits"
#: The example in float64, where other numbers of ranks change the last digits only; rank 0 gets a notice at a step.
_TRAIN = """
    import os, runpy, signal, sys
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_default_dtype(torch.float64)
    steps = [0]

    def count(*_):
        steps[0] += 1
        if os.environ["RANK"] == "0" and steps[0] == int(os.environ.get("STOP_AFTER", "0")):
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(count)
    sys.path.insert(0, "digits")
    sys.argv[0] = "digits/train_trainer.py"
    runpy.run_path("digits/train_trainer.py", run_name="__main__")
"""
_JOB = """
    nodes = 2
    command = "train64.py --epochs 1 --folder kept"
    [env]
    OMP_NUM_THREADS = 1
    RANKWISE_CHECK = 0
    [ssh]
    hosts = "gpu[0-1]"
"""


def put_digits(folder: Path) -> None:
    """Put the example and its job.toml, the same for every cluster, into a folder."""
    shutil.copytree(_DIGITS, folder / "digits", ignore=shutil.ignore_patterns("__pycache__"))
    write_script(folder, _TRAIN, "train64.py")
    write_script(folder, _JOB, "job.toml")


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return {
        one["step"] - len(one["losses"]) + 1 + n: loss
        for one in lines
        if one["kind"] == "report"
        for n, loss in enumerate(one["losses"])
    }


def go_on_here(folder: Path) -> None:
    """Resume the job that was stopped on a cluster, by one process on this machine: its losses are those of a run that nobody has stopped."""
    assert 0 < max(read_losses(folder / "kept")) < 30
    for own in (["--nodes", "1"], ["--nodes", "1", "--", "train64.py", "--epochs", "1", "--folder", "whole"]):
        done = call(folder, "submit", "--on", "local", *own)
        assert done.returncode == 0, done.stdout + done.stderr
    losses = read_losses(folder / "whole")
    assert sorted(losses) == list(range(1, 31))
    assert read_losses(folder / "kept") == pytest.approx(losses, abs=1e-12)
