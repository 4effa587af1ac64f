import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best, wait = float("inf"), 0
for epoch in range(100):
    for _ in range(5):
        opt.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
    with torch.no_grad():
        val = model(torch.randn(16, 8)).pow(2).mean().item()
    if val < best:
        best, wait = val, 0
    else:
        wait += 1
        if wait >= 3:
            print("early stopping at", epoch)
            break
dist.destroy_process_group()
