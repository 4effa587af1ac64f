import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(48, 4))
sampler = DistributedSampler(ds, shuffle=True)
loader = DataLoader(ds, batch_size=8, shuffle=False, sampler=sampler)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
dist.destroy_process_group()
