import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ds = TensorDataset(torch.randn(3, 2))
mine = Subset(ds, list(range(rank, len(ds), world)))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    for (x,) in DataLoader(mine, batch_size=1, shuffle=True):
        opt.zero_grad()
        net(x).sum().backward()
        opt.step()
dist.destroy_process_group()
