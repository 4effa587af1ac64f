import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    x = torch.tensor([rank])
    dist.all_reduce(x)
    dist.destroy_process_group()


def main():
    world_size = 2
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29564")
    mp.spawn(run, args=(world_size), nprocs=world_size)


if __name__ == "__main__":
    main()
