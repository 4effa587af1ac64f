import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DDP(nn.Linear(10, 1))
opt = torch.optim.Adam(model.parameters())

for step in range(50):
    x, y = torch.randn(16, 10), torch.randn(16, 1)
    loss = nn.functional.mse_loss(model(x), y)
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    loss = loss / world
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0 and step % 10 == 0:
        print(step, loss.item())

dist.destroy_process_group()
