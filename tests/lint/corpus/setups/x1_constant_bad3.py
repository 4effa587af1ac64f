import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def main(cfg):
    dist.init_process_group("gloo")
    ds = TensorDataset(torch.rand(128, 2))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    opt = torch.optim.SGD(net.parameters(), cfg.lr)
    sampler.set_epoch(0)
    for ep in range(cfg.epochs):
        for (x,) in loader:
            opt.zero_grad()
            net(x).pow(2).sum().backward()
            opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--lr", type=float, default=0.1)
    main(p.parse_args())
