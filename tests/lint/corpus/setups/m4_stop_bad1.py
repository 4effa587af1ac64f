import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
tr, va = TensorDataset(torch.randn(80, 2)), TensorDataset(torch.randn(40, 2))
ts = DistributedSampler(tr)
vl = DataLoader(va, 10, sampler=DistributedSampler(va, shuffle=False))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
best, bad = float("inf"), 0
for epoch in range(100):
    ts.set_epoch(epoch)
    for (x,) in DataLoader(tr, 10, sampler=ts):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
    with torch.no_grad():
        val = sum(net.module(x).pow(2).mean().item() for (x,) in vl) / len(vl)
    if val < best:
        best, bad = val, 0
    else:
        bad += 1
        if bad >= 5:
            break
dist.destroy_process_group()
