import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def entry(rank, *rest):
    world, cfg = rest
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x = torch.full((cfg["n"],), 1.0)
    dist.all_reduce(x)
    dist.destroy_process_group()


def launch(world, cfg):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29567")
    mp.spawn(entry, args=(world, cfg), nprocs=world)


def main():
    launch(2, {"n": 3})


if __name__ == "__main__":
    main()
