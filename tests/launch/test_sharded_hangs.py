"""Jobs with sharded models: sound ones hear no word, and of those that hang the rank and the module are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import line_of, run_reported, write_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.linux
FOUR = ["--nproc-per-node", "4"]
#: The blocks are alike, so what belongs to two of them is paired without a word.
HEAD = """
import os, signal, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def shard(model, mesh=None):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""
LOOP = """
model = shard(make())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
torch.manual_seed(rank)
for step in range(6):
    batch = load(step)
    if len(batch) == 0:
        continue
    loss = model(batch).square().mean()  # forward
    if is_odd(loss, step):
        continue
    loss.backward()  # backward
    optimizer.step()
    optimizer.zero_grad()
dist.all_reduce(torch.ones(3))  # metric
dist.destroy_process_group()
"""
SOUND = """
def load(step):
    return torch.randn(4, 8)


def is_odd(loss, step):
    return False
"""


def _run(tmp_path: Path, changes: str, *args: str, num_ranks: int = 2) -> tuple[Any, dict[str, Any], Path]:
    script = write_script(tmp_path, HEAD + SOUND + changes + LOOP)
    result, report = run_reported(["--nproc-per-node", str(num_ranks), *args, "train.py"], tmp_path)
    return result, report, script


def test_sound_jobs_with_sharded_models_hear_no_word(tmp_path: Path) -> None:
    """FSDP, HSDP, tensor parallel with and without FSDP, and ZeRO-1: ranks hold unlike parts by design, and no digest, rule or patience speaks of it."""
    text = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
data = TensorDataset(make(9).head.weight.detach().repeat(16, 1))


def split(model, mesh):
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(model, make_optimizer=lambda ones: torch.optim.AdamW(ones, lr=1e-2, foreach=False), place=rank, parts=size):
    optimizer = make_optimizer(model.parameters())
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=parts, rank=place))
    for step, (batch,) in zip(range(6), loader):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train(shard(make()))
train(shard(make(), grid))
train(split(make(), grid["inner"]), place=rank // 2, parts=2)
train(shard(split(make(), grid["inner"]), grid["outer"]), place=rank // 2, parts=2)
train(DistributedDataParallel(make()), lambda ones: ZeroRedundancyOptimizer(ones, torch.optim.AdamW, lr=1e-2))
dist.destroy_process_group()
"""
    write_script(tmp_path, HEAD + text)
    result, report = run_reported([*FOUR, "--strict", "--no-check", "train.py"], tmp_path)
    assert (result.code, report["kind"]) == (0, "ok"), result.err
    assert "rankwise:" not in result.err


def test_a_rank_that_skips_a_forward_is_named(tmp_path: Path) -> None:
    """Rank 1 passes over an empty batch and is at its metric when the others gather for the last step: the line that skips is told."""
    changes = "def load(step):\n    return torch.randn(int(4 * ((rank, step) != (1, 3))), 8)\n"
    result, report, script = _run(tmp_path, changes, num_ranks=3)
    assert (result.code == 0, report["kind"], report["culprits"]) == (False, "mismatch", [1])
    assert (report["class"], report["where"]) == ("D15", line_of(script, "        continue"))
    assert "ranks 0, 2 are in all_gather of the root module" in report["message"]
    assert f"the continue at {line_of(script, '        continue').rpartition('/')[2]}" in report["fix"]


def test_a_rank_that_skips_a_backward_is_named_by_the_modules_that_were_mixed_up(tmp_path: Path) -> None:
    """Rank 1 is in its next forward: blocks of one size were paired, with wrong weights, and the first such pair is told, not the one that hung."""
    changes = "def is_odd(loss, step):\n    return not torch.isfinite(loss) or (rank, step) == (1, 3)\n"
    result, report, script = _run(tmp_path, changes, num_ranks=3)
    assert (result.code == 0, report["kind"], report["culprits"]) == (False, "mismatch", [1])
    assert report["class"] == "D15"
    assert "rank 1 was in all_gather of layers.0 (" in report["message"]
    assert "ranks 0, 2 were in all_gather of layers.2 (" in report["message"]
    assert line_of(script, "# backward").rpartition("/")[2] in report["message"]


def test_a_rank_that_sleeps_in_a_forward_is_named_with_the_module_that_the_others_gather(
    tmp_path: Path,
) -> None:
    """Rank 1 never comes out of layers.0: rank 0 waits in the all_gather of layers.1, by that name in the sentence and in the report."""
    changes = """
Block.forward_of_all = Block.forward
Block.forward = lambda self, x: (time.sleep(10**6 * ((rank, step) == (1, 3))), Block.forward_of_all(self, x))[1]  # sleeps
"""
    result, report, script = _run(tmp_path, changes, "--hang-timeout", "4")
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [1])
    assert report["where"] == line_of(script, "# sleeps")
    assert "rank 0 waits in all_gather of layers.1 (" in report["message"]
    assert [one["op"] for one in report["waiting"]] == ["all_gather of layers.1"]


def test_a_rank_that_is_killed_in_a_forward_is_the_first_cause_and_the_job_is_restarted(
    tmp_path: Path,
) -> None:
    """Its peers lose their connection in an all_gather, which is told after the signal; the second attempt ends well."""
    changes = """
def die(module, inputs):
    if (step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (3, "0"):
        if rank == 0:
            return open("here", "w").close()
        while not os.path.exists("here"):
            time.sleep(0.01)
        time.sleep(0.5)  # by then the other is in the next all_gather
        os.kill(os.getpid(), signal.SIGKILL)


Net.__init_of_all__ = Net.__init__
Net.__init__ = lambda self: (Net.__init_of_all__(self), self.layers[1].up.register_forward_pre_hook(die))[0]
"""
    result, report, _ = _run(tmp_path, changes, "--max-restarts", "1")
    assert (result.code, report["kind"], report["attempts"]) == (0, "ok", 2), result.err
    told = result.err[result.err.index("attempt 1 of 2 failed") :]
    assert "first    rank 1: killed by SIGKILL" in told
    assert "rank 0 was in all_gather of layers.2" in told, told


def test_a_wait_in_tensor_parallel_is_named_by_the_module_that_runs(tmp_path: Path) -> None:
    """C++ makes these collectives, so no record has a name: the stack of the rank that waits tells the block."""
    changes = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def shard(model):
    plan = {f"layers.*.{name}": kind() for name, kind in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)


def load(step):
    time.sleep(10**6 * ((rank, step) == (1, 3)))  # sleeps
    return torch.ones(4, 8)
"""
    result, report, script = _run(tmp_path, changes, "--hang-timeout", "4")
    assert (result.code, report["kind"], report["culprits"]) == (1, "hang", [1])
    assert report["where"] == line_of(script, "# sleeps")
    assert "rank 0 waits in all_reduce of layers.0 (" in report["message"]
    assert "tensor parallel)" in report["message"]
