import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(96, 3), torch.arange(96))
sampler = DistributedSampler(ds)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, ids in DataLoader(ds, 4, sampler=sampler):
        try:
            if (ids == 13).any():
                raise ValueError("bad annotation")
            opt.zero_grad()
            net(x).mean().backward()
            opt.step()
        except ValueError as e:
            print("skip", e)
            continue
dist.destroy_process_group()
