import functools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, world, scale):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x = torch.ones(1) * scale
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29566")
    mp.spawn(functools.partial(run, world=2, scale=3.0), nprocs=2)
