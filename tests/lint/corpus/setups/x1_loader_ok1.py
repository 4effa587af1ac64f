import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(64, 4))
loader = DataLoader(ds, batch_size=8, sampler=DistributedSampler(ds))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
dist.destroy_process_group()
