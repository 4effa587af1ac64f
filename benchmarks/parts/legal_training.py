"""Training as sound jobs do it, with all that makes its ranks unequal for a while: what `benchmarks/soak.py` plays beside bare collectives."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from parts.legal import Stage

_WIDTH = 16
#: torch.compile with its own C++ is slow: once in a job.
_compiled: list[bool] = []


def build_model(**options: object) -> DistributedDataParallel:
    """Return a small model with buffers, wrapped."""
    layers = [nn.Linear(_WIDTH, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, _WIDTH)]
    return DistributedDataParallel(nn.Sequential(*layers), **options)


def build_batch() -> Tensor:
    """Return samples that are the rank's own."""
    return torch.randn(8, _WIDTH)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one optimizer step."""
    optimizer.zero_grad()
    model(build_batch()).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def evaluate_on_rank_0(stage: Stage) -> None:
    """Training, with an evaluation and a checkpoint on rank 0 alone, for which the others wait, and which all read then."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(stage.same.randint(1, 15)):
        step(model, optimizer)
        stage.dawdle()
    path = stage.folder / "model.pt"
    if stage.rank == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model.module(build_batch())
        stage.dawdle()
        torch.save(model.state_dict(), path)
        model.train()
    dist.barrier()
    model.load_state_dict(torch.load(path))
    dist.barrier()
    step(model, optimizer)


def join_uneven(stage: Stage) -> None:
    """Each rank has another number of batches, under Join."""
    model = build_model(broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Join([model]):
        for _ in range(1 + stage.own.randrange(12)):
            stage.dawdle()
            step(model, optimizer)
    dist.barrier()


def train_gan(stage: Stage) -> None:
    """Two models, two optimizers, one through the other, in turn."""
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, _WIDTH), nn.Tanh()))
    critic = DistributedDataParallel(nn.Linear(_WIDTH, 1), broadcast_buffers=False)
    both = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, critic)]
    for _ in range(stage.same.randint(1, 8)):
        both[1].zero_grad()
        fake = generator(torch.randn(8, 4))
        real_loss = (critic(build_batch()) - 1).square().mean()
        # One backward for each: DDP reduces once for each forward that it has prepared.
        real_loss.backward()
        critic(fake.detach()).square().mean().backward()
        both[1].step()
        stage.dawdle()
        both[0].zero_grad()
        critic.requires_grad_(requires_grad=False)
        (critic.module(fake) - 1).square().mean().backward()
        critic.requires_grad_(requires_grad=True)
        both[0].step()


def accumulate(stage: Stage) -> None:
    """Several backward passes in one step, with gradients added up in the last alone."""
    model = build_model(gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    every = stage.same.randint(2, 5)
    for number in range(every * 3):
        is_last = number % every == every - 1
        with nullcontext() if is_last else model.no_sync():
            model(build_batch()).square().mean().backward()
        stage.dawdle()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            lost = torch.tensor([1.0])
            dist.all_reduce(lost)


class Branches(nn.Module):
    """A model that uses another part of itself on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, x: Tensor, number: int) -> Tensor:
        """Use one part."""
        return self.parts[number % len(self.parts)](x)


def leave_unused(stage: Stage) -> None:
    """Parameters that are not used in a step, other ones on each rank."""
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(6):
        optimizer.zero_grad()
        model(build_batch(), stage.rank + number).square().mean().backward()
        stage.dawdle()
        optimizer.step()


class Samples(Dataset[Tensor]):
    """Samples, some of which take long."""

    def __init__(self, count: int, slow: int) -> None:
        self.count, self.slow = count, slow

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index == self.slow:
            time.sleep(0.7)
        return torch.full((_WIDTH,), float(index))


def load_data(stage: Stage) -> None:
    """Workers of a data loader that are now and then slow."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(24, stage.own.randrange(40)), batch_size=4, num_workers=2)
    for _ in range(stage.same.randint(1, 2)):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def compile_step(stage: Stage) -> None:
    """A compiled model under DDP; each rank takes its own time for it."""
    backend = "aot_eager" if _compiled else "inductor"
    _compiled.append(True)
    torch._dynamo.reset()
    model = build_model()
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(compiled, optimizer)
        stage.dawdle()


def shard_model(stage: Stage) -> None:
    """FSDP2, and after it an optimizer whose state is spread over the ranks."""
    model = nn.Sequential(nn.Linear(_WIDTH, 32), nn.Tanh(), nn.Linear(32, _WIDTH))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (stage.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(model, optimizer)
        stage.dawdle()
    replicated = build_model()
    spread = ZeroRedundancyOptimizer(
        replicated.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3, overlap_with_ddp=False
    )
    for _ in range(3):
        step(replicated, spread)
        stage.dawdle()
    if stage.same.random() < 0.5:
        spread.consolidate_state_dict(to=0)


PLAYS = (
    evaluate_on_rank_0,
    join_uneven,
    train_gan,
    accumulate,
    leave_unused,
    load_data,
    compile_step,
    shard_model,
)
