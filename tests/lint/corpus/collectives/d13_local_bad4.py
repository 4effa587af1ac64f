import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(shards):
    rank = dist.get_rank()
    if rank >= len(shards):
        print("rank", rank, "has no shard")
        return
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(4, 4)).sum().backward()
        opt.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    train(["part-000.parquet"])
    dist.destroy_process_group()
