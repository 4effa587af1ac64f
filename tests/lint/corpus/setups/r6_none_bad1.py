import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(2, 3).cuda()).sum().backward()
    opt.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "w.pt")
print("finished")
