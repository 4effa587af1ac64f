import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
docs = TensorDataset(torch.randn(200, 4))
loader = DataLoader(docs, batch_size=10, sampler=DistributedSampler(docs))
probe = DataLoader(docs, batch_size=10, sampler=DistributedSampler(docs, shuffle=False, drop_last=True))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for (x,) in loader:  # pretraining: each document is seen once
    opt.zero_grad()
    net(x).mean().backward()
    opt.step()
for _ in range(2):
    s = torch.zeros(1)
    with torch.no_grad():
        for (x,) in probe:
            s += net.module(x).sum()
    dist.all_reduce(s)
dist.destroy_process_group()
