import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(101, 2))
sampler = DistributedSampler(ds, drop_last=True)
loader = DataLoader(ds, batch_size=8, sampler=sampler, drop_last=True)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x).sum().backward()
        opt.step()
dist.destroy_process_group()
