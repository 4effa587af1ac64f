import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def ddp_setup(rank: int, world_size: int):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    torch.cuda.set_device(rank)
    dist.init_process_group(backend="nccl", rank=rank, world_size=world_size)


def main(rank, world_size):
    ddp_setup(rank, world_size)
    model = DDP(torch.nn.Linear(20, 1).to(rank), device_ids=[rank])
    model(torch.randn(4, 20, device=rank)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(main, args=(n,), nprocs=n)
