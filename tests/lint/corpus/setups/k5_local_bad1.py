import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100):
    opt.zero_grad()
    model(torch.randn(4, 8).cuda()).sum().backward()
    opt.step()
if local_rank == 0:
    torch.save(model.module.state_dict(), "/shared/ckpt/last.pt")
dist.barrier()
dist.destroy_process_group()
