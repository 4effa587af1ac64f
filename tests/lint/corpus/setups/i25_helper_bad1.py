import os

import torch
import torch.distributed as dist
from torchvision import datasets


def get_rank():
    if not dist.is_available():
        return 0
    if not dist.is_initialized():
        return 0
    return dist.get_rank()


def is_main():
    return get_rank() == 0


def main():
    if is_main():
        datasets.CIFAR10("./data", download=True)
    dist.init_process_group("gloo")
    dist.barrier()
    train = datasets.CIFAR10("./data", train=True, download=False)
    n = torch.tensor([len(train)])
    dist.all_reduce(n)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
