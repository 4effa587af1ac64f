import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29597")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def train(gpu, world_size):
    setup(gpu, world_size)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    net(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
