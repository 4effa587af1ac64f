import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
g = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(g)
model = DDP(torch.nn.Linear(2, 1).cuda(), device_ids=[g])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(100):
    try:
        loss = model(torch.randn(4, 2).cuda()).sum()
        loss.backward()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        opt.zero_grad(set_to_none=True)
        continue
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
