import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    dist.init_process_group(backend="nccl")
    dist.barrier()


def main():
    setup()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(8, 8).to(device), device_ids=[device.index])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8, device=device)).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
