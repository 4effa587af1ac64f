import copy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
ema = copy.deepcopy(model)
model = DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    opt.zero_grad()
    model(torch.randn(2, 2)).sum().backward()
    opt.step()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.module.parameters()):
            e.lerp_(p, 0.01)
dist.destroy_process_group()
