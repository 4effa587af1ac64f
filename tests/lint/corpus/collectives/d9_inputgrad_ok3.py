import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 1))
snapshot = copy.deepcopy(model.module)
for p in snapshot.parameters():
    p.requires_grad = False
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(2, 4)
    x.requires_grad_(True)
    opt.zero_grad()
    (model(x) - snapshot(x)).pow(2).mean().backward()
    opt.step()
dist.destroy_process_group()
