import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

MAX_STEPS = 7

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in itertools.count():
    if step >= MAX_STEPS:
        break
    opt.zero_grad()
    model(torch.randn(4, 4)).sum().backward()
    opt.step()
if dist.get_rank() == 0:
    print("stopped after", step)
dist.destroy_process_group()
