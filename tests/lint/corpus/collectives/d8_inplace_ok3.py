import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 4))
with torch.no_grad():
    model.module.bias.zero_()
    model.module.weight.mul_(0.5)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    opt.step()
    with torch.no_grad():
        model.module.weight.clamp_(-1, 1)
dist.destroy_process_group()
