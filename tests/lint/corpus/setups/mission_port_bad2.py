import torch
import torch.distributed as dist
import torch.multiprocessing as mp

URL = "tcp://127.0.0.1:23456"


def go(rank, n):
    dist.init_process_group("gloo", init_method=URL, rank=rank, world_size=n)
    t = torch.ones(1)
    dist.all_reduce(t)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(go, args=(2,), nprocs=2)
