import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, opt, step, path):
    if dist.get_rank() == 0:
        tmp = f"{path}.tmp"
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step}, tmp)
        os.replace(tmp, path)
    dist.barrier()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    opt.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    opt.step()
save(model, opt, step, "/tmp/atomic.pt")
dist.destroy_process_group()
