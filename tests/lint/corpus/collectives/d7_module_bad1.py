import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    x = torch.randn(4, 8)
    loss = model.module(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(dist.get_rank(), model.module[0].weight.sum().item())
dist.destroy_process_group()
