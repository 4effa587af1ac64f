"""A parameter server by hand, over torch's RPC and over Gloo: what benchmarks/parameter_server.py compares ours with.

RPC finds functions by the name of their module, and ranks of ``run_ranks`` have a copy of what they are given: so what is called remotely is
taken from the module as it was imported.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

LR = 1e-3
NUM_ROWS, ROW, BATCH = 10_000_000, 16, 4096


class Rate:
    """Counts the steps of a worker for so long, after some to warm up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def measure(self, step: Any) -> float:
        """Return steps per second."""
        for _ in range(3):
            step()
        count, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < self._seconds:
            step()
            count += 1
        return count / spent


def make_batches() -> list[torch.Tensor]:
    """Return row numbers, as they come in a batch of categories: some twice."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(NUM_ROWS, (BATCH,), generator=generator) for _ in range(8)]


class Held:
    """What a server by hand holds."""

    def __init__(self, values: torch.Tensor) -> None:
        self.weight = nn.Parameter(values)
        self.optimizer = torch.optim.SGD([self.weight], lr=LR)
        self.lock = threading.Lock()

    def apply(self, gradient: torch.Tensor) -> torch.Tensor:
        """Make one step, and return the parameters."""
        with self.lock:
            self.weight.grad = gradient
            self.optimizer.step()
            return self.weight.detach().clone()


HELD: list[Held] = []


def call_apply(gradient: torch.Tensor) -> torch.Tensor:
    """On the server, called by a worker."""
    return HELD[0].apply(gradient)


def call_look_up(rows: torch.Tensor) -> torch.Tensor:
    """On the server, called by a worker."""
    with HELD[0].lock:
        return HELD[0].weight.detach()[rows]


def call_push_rows(rows: torch.Tensor, gradient: torch.Tensor) -> None:
    """On the server, called by a worker."""
    with HELD[0].lock, torch.no_grad():
        HELD[0].weight.index_add_(0, rows, gradient, alpha=-LR)


def open_rpc() -> tuple[int, int]:
    """Make this rank an RPC agent; return rank and world size."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size)
    return rank, world_size


def run_rpc(size: int, seconds: float) -> float:
    """Push and pull by one remote call."""
    torch.set_num_threads(1)
    here = importlib.import_module("parts.served_by_hand")
    here.HELD.append(Held(torch.zeros(size)))
    rank, _ = open_rpc()
    rate = 0.0
    if rank:
        model, gradient = torch.zeros(size), torch.full((size,), 1e-3)
        rate = Rate(seconds).measure(lambda: model.copy_(rpc.rpc_sync("rank0", here.call_apply, (gradient,))))
    rpc.shutdown()
    return rate


def run_gloo(size: int, seconds: float) -> float:
    """Push and pull by send and recv; an empty message ends it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rate = 0.0
    if rank == 0:
        held = Held(torch.zeros(size))

        def serve(worker: int) -> None:
            gradient, goes_on = torch.empty(size), torch.zeros(1)
            while True:
                dist.recv(goes_on, worker)
                if not goes_on.item():
                    return
                dist.recv(gradient, worker)
                dist.send(held.apply(gradient), worker)

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(1, world_size)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    else:
        model, gradient = torch.zeros(size), torch.full((size,), 1e-3)
        goes_on = torch.ones(1)

        def step() -> None:
            dist.send(goes_on, 0)
            dist.send(gradient, 0)
            dist.recv(model, 0)

        rate = Rate(seconds).measure(step)
        dist.send(torch.zeros(1), 0)
    dist.destroy_process_group()
    return rate


def look_up_rpc(seconds: float) -> float:
    """Look up rows and push their gradients, by two remote calls; rows that come twice are added up, as an embedding does."""
    torch.set_num_threads(1)
    here = importlib.import_module("parts.served_by_hand")
    here.HELD.append(Held(torch.zeros(NUM_ROWS if os.environ["RANK"] == "0" else 1, ROW)))
    rank, _ = open_rpc()
    rate, number = 0.0, 0
    if rank:
        batches, gradient = make_batches(), torch.full((BATCH, ROW), 1e-3)

        def step() -> None:
            nonlocal number
            rows = batches[number % len(batches)]
            values = rpc.rpc_sync("rank0", here.call_look_up, (rows,)).requires_grad_()
            (values * 1.0).backward(gradient)
            rpc.rpc_sync("rank0", here.call_push_rows, (rows, values.grad))
            number += 1

        rate = Rate(seconds).measure(step)
    rpc.shutdown()
    return rate
