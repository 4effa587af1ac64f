import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")


def collate(items):
    return torch.stack(items).cuda()


ds = [torch.randn(4) for _ in range(128)]
sampler = DistributedSampler(ds)
loader = DataLoader(ds, 8, sampler=sampler, num_workers=2, collate_fn=collate)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).cuda(), device_ids=[local])
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in loader:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
dist.destroy_process_group()
