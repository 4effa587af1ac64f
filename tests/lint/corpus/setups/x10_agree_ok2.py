import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(64, 3))
sampler = DistributedSampler(ds)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(ds, 4, sampler=sampler):
        bad = (~torch.isfinite(x)).any().float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad > 0:
            continue
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
dist.destroy_process_group()
