import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=0, world_size=world_size)
w = torch.zeros(2, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.01)
for i in range(10):
    opt.zero_grad()
    ((w * rank).sum() - 3).pow(2).backward()
    dist.all_reduce(w.grad)
    w.grad /= world_size
    opt.step()
dist.destroy_process_group()
