import os
import torch
import torch.distributed as dist
import wandb
from dist_utils import get_rank, setup
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = get_rank()

if RANK == 0:
    wandb.init(project="vision")

setup()
local_rank = int(os.environ["LOCAL_RANK"])
model = DDP(torch.nn.Linear(8, 1).cuda(local_rank), device_ids=[local_rank])
opt = torch.optim.Adam(model.parameters())
for it in range(1000):
    loss = model(torch.randn(16, 8).cuda(local_rank)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if RANK == 0 and it % 50 == 0:
        wandb.log({"loss": loss.item()})
dist.destroy_process_group()
