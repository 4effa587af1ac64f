import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def validate(net, loader):
    right = total = 0
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum().item()
        total += len(y)
    return right / total


def main():
    dist.init_process_group("gloo")
    tr = TensorDataset(torch.randn(80, 2), torch.randint(0, 2, (80,)))
    va = TensorDataset(torch.randn(40, 2), torch.randint(0, 2, (40,)))
    ts = DistributedSampler(tr)
    vl = DataLoader(va, 10, sampler=DistributedSampler(va, shuffle=False))
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    best = 0.0
    for epoch in range(10):
        ts.set_epoch(epoch)
        for x, y in DataLoader(tr, 10, sampler=ts):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        acc = validate(net.module, vl)
        if dist.get_rank() == 0 and acc > best:
            best = acc
            torch.save(net.module.state_dict(), "best.tmp")
            os.replace("best.tmp", "best.pt")
    dist.destroy_process_group()


main()
