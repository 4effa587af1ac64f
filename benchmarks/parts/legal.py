"""What a sound job may do between ranks, and how late its ranks may be: the stage of `benchmarks/soak.py`, and collectives called by hand."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import random
    from pathlib import Path

#: Of all delays: most are short, some are noticed, few are longer than what is noted.
_SOME, _FEW = 0.1, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a rank plays.

    Attributes:
        rank: Who it is.
        size: How many there are.
        same: Random numbers that are the same on all ranks.
        own: Random numbers that are the rank's own.
        halves: Groups of the even and of the odd ranks.
        aside: One group of all ranks, for other threads.
        folder: Files that all ranks see.
        longest_s: The longest delay.
    """

    rank: int
    size: int
    same: random.Random
    own: random.Random
    halves: tuple[dist.ProcessGroup, ...]
    aside: dist.ProcessGroup
    folder: Path
    longest_s: float

    def dawdle(self) -> None:
        """Be late by chance, as real ranks are: asleep, at work in Python, or in C code that holds the interpreter."""
        draw = self.own.random()
        bound_s = self.longest_s if draw < _FEW else 1.0 if draw < _SOME else 0.02
        for_s = self.own.uniform(0, min(bound_s, self.longest_s))
        how = self.own.randrange(10)
        if how == 0:
            end_s = time.monotonic() + for_s
            while time.monotonic() < end_s:
                pass
        elif how == 1:
            ctypes.PyDLL(None).usleep(int(for_s * 1e6))
        else:
            time.sleep(for_s)


def reduce_and_spread(stage: Stage) -> None:
    """Collectives one after the other, of all types and sizes."""
    for _ in range(stage.same.randint(1, 20)):
        size = stage.same.randint(1, 2000)
        x = torch.ones(size, dtype=stage.same.choice([torch.float32, torch.float64, torch.int64]))
        dist.all_reduce(x, op=stage.same.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX]))
        dist.broadcast(x, src=stage.same.randrange(stage.size))
        stage.dawdle()
    dist.reduce(x, dst=stage.same.randrange(stage.size))
    dist.all_gather([torch.empty_like(x) for _ in range(stage.size)], x)


def differ_in_line(stage: Stage) -> None:
    """The same collective from other lines, by rank."""
    for _ in range(5):
        x = torch.full((8,), float(stage.rank))
        if stage.rank == 0:
            x += 1
            dist.broadcast(x, src=0)
        else:
            stage.dawdle()
            dist.broadcast(x, src=0)
    if stage.rank % 2:
        dist.barrier()
    else:
        stage.dawdle()
        dist.barrier()


def differ_in_size(stage: Stage) -> None:
    """Pieces that are not equal where they need not be: all_to_all, scatter and gather."""
    counts = [1 + (sender + receiver) % 3 for sender in range(stage.size) for receiver in range(stage.size)]
    out = counts[stage.rank * stage.size : (stage.rank + 1) * stage.size]
    into = counts[stage.rank :: stage.size]
    received = torch.empty(sum(into))
    stage.dawdle()
    dist.all_to_all_single(received, torch.ones(sum(out)), into, out)
    root, x = stage.same.randrange(stage.size), torch.ones(4)
    many = [torch.ones(4) for _ in range(stage.size)] if stage.rank == root else None
    dist.scatter(x, many, src=root)
    stage.dawdle()
    dist.gather(x, [torch.empty(4) for _ in range(stage.size)] if stage.rank == root else None, dst=root)
    dist.reduce_scatter(torch.empty(4), [torch.ones(4) for _ in range(stage.size)])


def divide(stage: Stage) -> None:
    """Groups with their own collectives: other ones, other sizes, and another number of them in each."""
    odd = stage.rank % 2
    group = stage.halves[odd]
    for _ in range(3 + 4 * odd):
        stage.dawdle()
        if odd:
            dist.all_reduce(torch.ones(7), group=group)
        else:
            dist.barrier(group=group)
    fresh = dist.new_group(sorted(stage.same.sample(range(stage.size), max(1, stage.size - 1))))
    if dist.get_rank(fresh) >= 0:
        stage.dawdle()
        dist.all_reduce(torch.ones(3), group=fresh)
        dist.destroy_process_group(fresh)


def send_around(stage: Stage) -> None:
    """Messages around a ring, first all at once, and then one after the other."""
    after, before = (stage.rank + 1) % stage.size, (stage.rank - 1) % stage.size
    x, y = torch.ones(500), torch.empty(500)
    for _ in range(3):
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)
        ])  # fmt: skip
        stage.dawdle()
        for work in works:
            work.wait()
    for tag in range(3):
        if stage.rank == 0:
            dist.send(x, after, tag=tag)
            dist.recv(y, before, tag=tag)
        else:
            dist.recv(y, before, tag=tag)
            stage.dawdle()
            dist.send(y, after, tag=tag)


def collect_objects(stage: Stage) -> None:
    """Objects of other sizes on each rank."""
    mine = {"rank": stage.rank, "text": "x" * stage.own.randint(0, 3000)}
    found: list[object] = [None] * stage.size
    stage.dawdle()
    dist.all_gather_object(found, mine)
    dist.gather_object(mine, found if stage.rank == 0 else None, dst=0)
    reported = [mine if stage.rank == 0 else None]
    stage.dawdle()
    dist.broadcast_object_list(reported, src=0)
    got = [None]
    dist.scatter_object_list(got, list(range(stage.size)) if stage.rank == 0 else None, src=0)
    if got != [stage.rank] or reported != [{**mine, **(reported[0] or {})}]:
        raise SystemExit(f"rank {stage.rank} got {got}, {reported}")


def wait_late(stage: Stage) -> None:
    """Collectives begun together, and waited for much later, by each rank in an order of its own; some never."""
    works = [dist.all_reduce(torch.ones(10 + number), async_op=True) for number in range(6)]
    stage.own.shuffle(works)
    for work in works:
        stage.dawdle()
        work.wait()
    dist.all_reduce(torch.ones(5), async_op=True)


def guard_barrier(stage: Stage) -> None:
    """A monitored barrier, and a store that ranks wait at."""
    stage.dawdle()
    dist.monitored_barrier()
    store, key = dist.distributed_c10d._get_default_store(), f"soak/{stage.same.random()}"
    if stage.rank == 0:
        stage.dawdle()
        store.set(key, "ready")
    store.wait([key])


def work_aside(stage: Stage) -> None:
    """A thread with a group of its own, while the main one goes on with all of them."""
    rounds = stage.same.randint(1, 10)

    def run() -> None:
        for _ in range(rounds):
            dist.all_reduce(torch.ones(3), group=stage.aside)
            time.sleep(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(rounds // 2):
        stage.dawdle()
        dist.all_reduce(torch.ones(9))
    thread.join()


def start_processes(stage: Stage) -> None:
    """A fork that ends at once, a program, and one that is let go on."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(0.2)"], check=True)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1)"])
    stage.dawdle()
    dist.barrier()
    child.wait()


def stop_together(stage: Stage) -> None:
    """One rank wants to end, and all do, in the same round; a bad loss is left out by all if one has it."""
    while True:
        stage.dawdle()
        wants = torch.tensor([float(stage.own.random() < 0.3)])
        dist.all_reduce(wants, op=dist.ReduceOp.MAX)
        if wants.item():
            return


PLAYS = (
    reduce_and_spread, differ_in_line, differ_in_size, divide, send_around, collect_objects, wait_late, guard_barrier, work_aside,
    start_processes, stop_together,
)  # fmt: skip
