import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
if distributed:
    dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(48, 4))
sampler = DistributedSampler(ds) if distributed else None
loader = DataLoader(ds, batch_size=8, shuffle=(sampler is None), sampler=sampler)
net = torch.nn.Linear(4, 1)
if distributed:
    net = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
if distributed:
    dist.destroy_process_group()
