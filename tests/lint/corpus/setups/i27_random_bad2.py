import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, world):
    port = random.randint(20000, 60000)
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
    model(torch.randn(3, 5)).mean().backward()
    dist.destroy_process_group()


def launch(n=2):
    mp.spawn(train, args=(n,), nprocs=n, join=True)


if __name__ == "__main__":
    launch()
