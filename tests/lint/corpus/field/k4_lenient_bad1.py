import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
sd = torch.nn.Linear(2, 1).state_dict()
model.load_state_dict(sd, strict=False)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt.zero_grad()
model(torch.randn(2, 2)).sum().backward()
opt.step()
dist.destroy_process_group()
