import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best, wait = float("inf"), 0
for step in range(200):
    loss = model(torch.randn(4, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    stop = torch.zeros(1)
    if rank == 0:
        if loss.item() < best:
            best, wait = loss.item(), 0
        else:
            wait += 1
        stop[0] = float(wait >= 3)
    dist.broadcast(stop, src=0)
    if stop.item():
        break
dist.destroy_process_group()
