import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
net = torch.nn.Linear(64, 64)
net.to(torch.device("cuda", local_rank))
model = DDP(net, device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(8, 64, device="cuda")).pow(2).mean().backward()
    opt.step()
if dist.get_rank() == 0:
    state = {k: v.cpu() for k, v in model.module.state_dict().items()}
    torch.save(state, "final.pt")
dist.destroy_process_group()
