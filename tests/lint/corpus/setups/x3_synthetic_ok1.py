import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
g = torch.Generator().manual_seed(100 + dist.get_rank())
ds = TensorDataset(torch.randn(128, 6, generator=g))
loader = DataLoader(ds, batch_size=16, shuffle=True)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    for (x,) in loader:
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
dist.destroy_process_group()
