import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
g = torch.Generator().manual_seed(1)
raw = TensorDataset(torch.randn(100, 3, generator=g))
keep = [i for i in range(len(raw)) if raw[i][0].norm() > 0.5]
ds = Subset(raw, keep)
sampler = DistributedSampler(ds)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(ds, 5, sampler=sampler):
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
dist.destroy_process_group()
