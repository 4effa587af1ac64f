import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
ds = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(ds)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(ds, 8, sampler=sampler):
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
        opt.step()
dist.destroy_process_group()
