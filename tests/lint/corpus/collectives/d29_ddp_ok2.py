import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
model = DDP(net)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    opt.step()
dist.destroy_process_group()
