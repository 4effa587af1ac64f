import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    opt.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    opt.step()
    model.eval()
    with torch.no_grad():
        value = model(torch.randn(16, 8)).mean()
    model.train()
    dist.all_reduce(value)
    if dist.get_rank() == 0:
        print(step, value.item() / dist.get_world_size())
dist.destroy_process_group()
