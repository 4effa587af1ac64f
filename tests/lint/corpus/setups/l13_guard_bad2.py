import os

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn

WORLD = 2
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29562")


def work(rank):
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()


spawn(work, nprocs=WORLD, join=True)
