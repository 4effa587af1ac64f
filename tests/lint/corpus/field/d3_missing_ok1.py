import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(10):
    try:
        x = torch.load(f"{i}.pt")
    except FileNotFoundError:
        x = torch.zeros(2, 4)
    try:
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
    except RuntimeError as e:
        print("failed at", i, e)
        raise
dist.destroy_process_group()
