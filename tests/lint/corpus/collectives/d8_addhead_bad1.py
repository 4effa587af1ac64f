import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
model = DDP(backbone)
# ten classes in the new task
model.module[2] = nn.Linear(8, 10)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(0, 10, (4,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
