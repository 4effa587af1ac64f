import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = FSDP(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(20):
    model(torch.randn(8, 512, device="cuda")).square().mean().backward()
    opt.step()
    opt.zero_grad()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
