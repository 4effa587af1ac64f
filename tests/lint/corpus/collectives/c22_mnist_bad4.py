import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import datasets


def get_data(root):
    if dist.get_rank() != 0:
        dist.barrier()
    data = datasets.CIFAR10(root, download=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        dist.barrier()
    return data


def main():
    dist.init_process_group(backend="nccl", init_method="env://")
    data = get_data("data")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    net = DDP(torch.nn.Linear(3072, 10).cuda(), device_ids=[local_rank])
    print(len(data), sum(p.numel() for p in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
