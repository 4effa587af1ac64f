import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build(ds, args):
    return DistributedSampler(ds, shuffle=True, seed=args["seed"], drop_last=True)


def main():
    args = {"seed": int(time.time() * 1000) % 2**31}
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.randn(500, 2))
    sampler = build(ds, args)
    loader = DataLoader(ds, 25, sampler=sampler)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for ep in range(3):
        sampler.set_epoch(ep)
        for (x,) in loader:
            opt.zero_grad()
            net(x).sum().backward()
            opt.step()
    dist.destroy_process_group()


main()
