import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds, test = TensorDataset(torch.randn(64, 3)), TensorDataset(torch.randn(30, 3))
sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
test_loader = DataLoader(test, batch_size=10)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            mse = sum(net.module(x).pow(2).sum() for (x,) in test_loader) / len(test)
        print("test mse", float(mse))
    dist.barrier()
dist.destroy_process_group()
