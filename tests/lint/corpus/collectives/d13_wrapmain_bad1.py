import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Linear(4, 1)
if rank == 0:
    model = DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()
