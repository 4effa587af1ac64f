import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(rank), device_ids=[rank])
    net(torch.ones(1, 2, device=rank)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29572")
    gpus = torch.cuda.device_count()
    mp.spawn(worker, args=(gpus,), nprocs=gpus)
