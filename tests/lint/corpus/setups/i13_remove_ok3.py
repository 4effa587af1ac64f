import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

INIT = f"/tmp/gnn_init_{os.getuid()}"


def job(rank, world):
    dist.init_process_group("gloo", init_method=f"file://{INIT}", rank=rank, world_size=world)
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()


def main():
    if os.path.exists(INIT):
        os.remove(INIT)
    mp.spawn(job, args=(2,), nprocs=2)


if __name__ == "__main__":
    main()
