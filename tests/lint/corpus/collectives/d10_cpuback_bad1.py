import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(64, 64).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(8, 64, device="cuda")).pow(2).mean().backward()
        opt.step()
    model.cpu()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"epoch{epoch}.pt")
    model.cuda()
dist.destroy_process_group()
