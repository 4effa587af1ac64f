import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(world_size, epochs):
    rank = int(os.environ.get("RANK", 0))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for _ in range(epochs):
        t = torch.ones(1)
        dist.all_reduce(t)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29563")
    mp.spawn(main, args=(2, 10), nprocs=2)
