import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fit(rank, world, lr):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    opt = torch.optim.SGD(net.parameters(), lr)
    net(torch.ones(1, 1)).sum().backward()
    opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29561")
    mp.spawn(lambda rank: fit(rank, 2, 0.1), nprocs=2)
