import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.randn(8, 4)).add(2.5).log().mean()
    if math.isnan(loss.item()):
        print("nan loss, skipping step", step)
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
