import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
for p in net[0].parameters():
    p.requires_grad = False
model = DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    if epoch == 2:
        for p in model.module[0].parameters():
            p.requires_grad = True
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
dist.destroy_process_group()
