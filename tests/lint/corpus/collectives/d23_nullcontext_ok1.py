import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUM = 4
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for micro in range(ACCUM):
        last = micro == ACCUM - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(torch.randn(4, 8)).pow(2).mean() / ACCUM
            loss.backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
