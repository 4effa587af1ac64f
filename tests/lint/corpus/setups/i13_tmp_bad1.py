import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    # rendezvous through the shared file system
    dist.init_process_group(
        backend="gloo",
        init_method="file:///tmp/ddp_rendezvous",
        rank=rank,
        world_size=world_size,
    )


def train_fn(rank, world_size, epochs):
    setup(rank, world_size)
    model = DDP(nn.Sequential(nn.Linear(20, 4), nn.LogSoftmax(-1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        opt.zero_grad()
        F.nll_loss(model(torch.randn(8, 20)), torch.randint(0, 4, (8,))).backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train_fn, args=(2, 3), nprocs=2, join=True)
