"""Jobs whose stages are cut by torch's own pipelining: sound ones hear no word, and of those that hang the rank, the stage and the micro-batch are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import line_of, run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
PIPELINES, WIDTH, MICROBATCHES, SCHEDULE, PER_RANK = 1, 8, 4, "Schedule1F1B", 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(x))


def load(step):
    return torch.randn(8, WIDTH)


def is_odd(step):
    return False


def compute_loss(output, target):
    return (output - target).square().mean()
"""
LOOP = """
columns = [list(range(one, size, PIPELINES)) for one in range(PIPELINES)]
groups = [dist.new_group(one) for one in columns]
column, group = columns[rank % PIPELINES], groups[rank % PIPELINES]
place, num_stages = column.index(rank), len(column) * PER_RANK
stages = [
    pipelining.PipelineStage(Block(), number, num_stages, torch.device("cpu"), group=group)
    for number in range(place, num_stages, len(column))
]
make = getattr(pipelining, SCHEDULE)
schedule = make(stages if PER_RANK > 1 else stages[0], MICROBATCHES, loss_fn=compute_loss)
optimizer = torch.optim.SGD([one for stage in stages for one in stage.submod.parameters()], lr=1e-3)
for step in range(6):
    batch = load(step)
    if is_odd(step):
        continue  # odd
    if place == 0:
        schedule.step(batch)  # first
    elif place == len(column) - 1:
        schedule.step(target=batch)  # last
    else:
        schedule.step()  # middle
    optimizer.step()
    optimizer.zero_grad()
dist.all_reduce(torch.ones(3))  # metric
dist.destroy_process_group()
"""


def _run(tmp_path: Path, changes: str, *args: str, num_ranks: int = 2) -> tuple[Any, dict[str, Any], Path]:
    script = write_script(tmp_path, HEAD + changes + LOOP)
    result, report = run_reported(["--nproc-per-node", str(num_ranks), "--no-check", *args, "train.py"], tmp_path)
    return result, report, script


def test_sound_jobs_with_pipelines_hear_no_word(tmp_path: Path) -> None:
    """Three schedules in a row, a stage that is slow by design, ranks that stand under tests of the rank: no rule and no patience speaks of it."""
    changes = "def load(step):\n    time.sleep(0.1 * (rank == 1))\n    return torch.randn(8, WIDTH)\n"
    loops = [changes + LOOP.replace("dist.destroy_process_group()", "")]
    for schedule, per_rank in (("ScheduleGPipe", 1), ("ScheduleInterleaved1F1B", 2)):
        loops.append(f"SCHEDULE, PER_RANK = {schedule!r}, {per_rank}\n{loops[0]}")
    write_script(tmp_path, HEAD + "\n".join(loops) + "dist.destroy_process_group()\n")
    result, report = run_reported(["--nproc-per-node", "2", "--strict", "--no-check", "train.py"], tmp_path)
    assert (result.code, report["kind"]) == (0, "ok"), result.err
    assert "rankwise:" not in result.err


def test_a_stage_that_stays_in_its_loader_is_named_with_what_the_next_one_waits_for(tmp_path: Path) -> None:
    """Two pipelines beside each other: ranks 0 and 1 are one stage, and are told as such, with the micro-batch and the direction; no rank test is blamed."""
    changes = """
PIPELINES, SCHEDULE = 2, "ScheduleGPipe"


def load(step):
    time.sleep(10**6 * (rank in (0, 1) and step == 3))  # sleeps
    return torch.randn(8, WIDTH)
"""
    result, report, script = _run(tmp_path, changes, "--hang-timeout", "4", num_ranks=4)
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [0, 1])
    assert (report["class"], report["where"]) == (None, line_of(script, "# sleeps"))
    place = line_of(script, "# last").rpartition("/")[2]
    assert "stage 0 (ranks 0, 1) is sleeping at train.py:" in report["message"]
    assert f"stage 1 (ranks 2, 3) waits for activations of micro-batch 0 from stage 0 at {place}" in report["message"]
    assert {one["op"] for one in report["waiting"]} == {"irecv of activations of micro-batch 0 from stage 0"}


def test_a_rank_that_is_killed_in_a_schedule_is_the_first_cause_and_the_job_is_restarted(
    tmp_path: Path,
) -> None:
    """Its neighbours lose their connections: what each of them wanted of it is told by stage and micro-batch; the second attempt ends well."""
    changes = """
step, count = 0, 0
Block.forward_of_all = Block.forward


def forward(self, x):
    global count
    count += rank == 1
    if (count, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (10, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return self.forward_of_all(x)


Block.forward = forward
"""
    result, report, _ = _run(tmp_path, changes, "--max-restarts", "1", num_ranks=3)
    assert (result.code, report["kind"], report["attempts"]) == (0, "ok", 2), result.err
    told = result.err[result.err.index("attempt 1 of 2 failed") :]
    assert "first    rank 1: killed by SIGKILL" in told
    assert "rank 2 was in irecv of activations of micro-batch " in told
    assert " from stage 1" in told


def test_a_stage_that_skips_a_step_is_named_and_not_its_neighbours(tmp_path: Path) -> None:
    """Rank 1 is at the metric when the others are in their last step: its neighbours wait in messages that it never answers, and only it is to blame."""
    changes = "def is_odd(step):\n    return (rank, step) == (1, 3)\n"
    result, report, script = _run(tmp_path, changes, num_ranks=3)
    assert (result.code == 0, report["kind"], report["culprits"]) == (False, "hang", [1])
    assert (report["class"], report["where"]) == ("D14", line_of(script, "# metric"))
    assert "stage 1 (rank 1) is in all_reduce #1" in report["message"]
    assert "stage 2 (rank 2) waits for activations of micro-batch 0 from stage 1" in report["message"]
    assert "the same number of steps" in report["fix"]
