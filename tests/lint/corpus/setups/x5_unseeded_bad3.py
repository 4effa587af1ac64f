import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def run(rank, world):
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ds = TensorDataset(torch.arange(200.0).unsqueeze(1))
    idx = torch.randperm(len(ds)).tolist()
    train, val = Subset(ds, idx[:160]), Subset(ds, idx[160:])
    sampler = DistributedSampler(train)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    opt = torch.optim.SGD(net.parameters(), 1e-5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(train, 16, sampler=sampler):
            opt.zero_grad()
            net(x).mean().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29583")
    mp.spawn(run, args=(2,), nprocs=2)
