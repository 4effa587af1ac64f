import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(100, 4), torch.randint(0, 3, (100,)))
sampler = DistributedSampler(ds)
loader = DataLoader(ds, 8, sampler=sampler, drop_last=True)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
dist.destroy_process_group()
