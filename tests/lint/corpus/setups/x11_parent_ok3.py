import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchvision import datasets


def run(rank, world, root):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    n = torch.tensor(len(datasets.MNIST(root, download=False)))
    dist.all_reduce(n)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29592")
    datasets.MNIST("/tmp/mnist", download=True)
    mp.spawn(run, args=(2, "/tmp/mnist"), nprocs=2)
