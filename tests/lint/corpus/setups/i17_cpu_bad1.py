import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

# small tabular model, no gpu needed
device = torch.device("cpu")
dist.init_process_group("nccl")
rank = dist.get_rank()
model = DDP(torch.nn.Sequential(torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device))
opt = torch.optim.Adam(model.parameters())
for step in range(200):
    x = torch.randn(128, 30, device=device)
    opt.zero_grad()
    model(x).pow(2).mean().backward()
    opt.step()
dist.destroy_process_group()
