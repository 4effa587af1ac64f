import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
last = time.time()
for step in range(2000):
    opt.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    opt.step()
    if time.time() - last > 0.5:
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"ckpt_{step}.pt")
        last = time.time()
dist.destroy_process_group()
