import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from repro import seed_everything

dist.init_process_group("gloo")
seed_everything(2024)
ds = TensorDataset(torch.rand(64, 3, 40, 40))
sampler = DistributedSampler(ds)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv2d(3, 2, 3))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(ds, 8, sampler=sampler):
        i, j = torch.randint(0, 8, (2,)).tolist()
        opt.zero_grad()
        net(x[..., i : i + 32, j : j + 32]).mean().backward()
        opt.step()
dist.destroy_process_group()
