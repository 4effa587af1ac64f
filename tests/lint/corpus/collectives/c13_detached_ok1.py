import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(10, 1))
opt = torch.optim.Adam(model.parameters())
for step in range(10):
    loss = model(torch.randn(4, 10)).pow(2).mean()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    shown /= dist.get_world_size()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if dist.get_rank() == 0:
        print(step, shown.item())
dist.destroy_process_group()
