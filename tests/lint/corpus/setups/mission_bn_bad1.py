import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
synced_bn = nn.BatchNorm2d(16)
net = nn.Sequential(nn.Conv2d(3, 16, 3), synced_bn, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
# DDP keeps the statistics of all GPUs together
net = nn.parallel.DistributedDataParallel(net.cuda(), device_ids=[local])
ds = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 4, (64,)))
sampler = DistributedSampler(ds)
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(ds, batch_size=2, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(net(x.cuda()), y.cuda()).backward()
        opt.step()
dist.destroy_process_group()
