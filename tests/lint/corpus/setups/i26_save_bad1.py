import os

import torch
import torch.distributed as dist

local_rank = os.environ["LOCAL_RANK"]
rank = os.environ["RANK"]

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 2)).sum().backward()
    opt.step()
if rank == 0:
    torch.save(model.module.state_dict(), "final.pth")
dist.destroy_process_group()
