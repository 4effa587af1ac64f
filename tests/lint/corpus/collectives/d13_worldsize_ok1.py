import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

world = int(os.environ.get("WORLD_SIZE", "1"))
distributed = world > 1
if distributed:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
model = nn.Linear(4, 1)
if distributed:
    model = DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    opt.step()
if distributed:
    dist.destroy_process_group()
