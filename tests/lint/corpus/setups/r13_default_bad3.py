import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    device = "cuda"
    x = torch.full((3,), float(rank), device=device)
    dist.all_reduce(x)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    n = torch.cuda.device_count()
    mp.spawn(worker, args=(n,), nprocs=n)
