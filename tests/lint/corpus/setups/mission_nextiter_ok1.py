import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(64, 3))
dl = DataLoader(ds, 8, sampler=DistributedSampler(ds))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
it = iter(dl)
for _ in range(len(dl)):
    (x,) = next(it)
    opt.zero_grad()
    net(x).sum().backward()
    opt.step()
dist.destroy_process_group()
