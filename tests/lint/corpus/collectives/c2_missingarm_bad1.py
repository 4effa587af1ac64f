import os

import torch.distributed as dist
from torchvision import datasets, transforms


def load(root):
    rank = dist.get_rank()
    if rank != 0:
        dist.barrier()

    train = datasets.MNIST(root, train=True, download=(rank == 0), transform=transforms.ToTensor())

    if rank != 0:
        dist.barrier()
    return train


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ds = load(os.path.expanduser("~/data"))
    print(len(ds))
    dist.destroy_process_group()
