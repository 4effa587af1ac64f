import os

import torch
import torch.distributed as dist

os.environ["RANK"] = "0"
os.environ["WORLD_SIZE"] = "1"

local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo")
print("local", local_rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    opt.step()
dist.destroy_process_group()
