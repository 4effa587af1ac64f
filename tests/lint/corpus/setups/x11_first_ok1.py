import os

import torch
import torch.distributed as dist
from torchvision import datasets


def get_data(root):
    local = int(os.environ["LOCAL_RANK"])
    if local != 0:
        dist.barrier()
    ds = datasets.MNIST(root, train=True, download=(local == 0))
    if local == 0:
        dist.barrier()
    return ds


dist.init_process_group("gloo")
n = torch.tensor(len(get_data("/tmp/mnist")))
dist.all_reduce(n)
dist.destroy_process_group()
