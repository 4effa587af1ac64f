"""sbatch --requeue --time=48:00:00 job.sh"""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["SLURM_PROCID"])
local = int(os.environ["SLURM_LOCALID"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", init_method="env://", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))
model = DDP(torch.nn.TransformerEncoderLayer(512, 8).cuda(), device_ids=[local])
opt = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(1_000_000):
    loss = model(torch.randn(64, 32, 512, device="cuda")).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
if rank == 0:
    torch.save(model.module.state_dict(), "final.pt")
dist.destroy_process_group()
