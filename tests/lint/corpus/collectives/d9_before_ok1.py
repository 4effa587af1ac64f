import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
teacher = nn.Linear(8, 1)
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
for p in net[0].parameters():
    p.requires_grad = False
model = DDP(net)
teacher.requires_grad_(False)
teacher.eval()
opt = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
torch.manual_seed(dist.get_rank() + 1)
for _ in range(3):
    x = torch.randn(4, 8)
    opt.zero_grad()
    (model(x) - teacher(x)).pow(2).mean().backward()
    opt.step()
dist.destroy_process_group()
