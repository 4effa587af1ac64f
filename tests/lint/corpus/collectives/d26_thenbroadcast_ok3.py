import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Linear(8, 1))
if rank == 0 and os.path.exists("/tmp/none/init.pt"):
    model.module.load_state_dict(torch.load("/tmp/none/init.pt", map_location="cpu", weights_only=True))
for tensor in model.module.state_dict().values():
    dist.broadcast(tensor, src=0)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    opt.step()
dist.destroy_process_group()
