import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(64, 8).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
skipped = 0
for step in range(100):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(32, 64, device="cuda")).pow(2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
        continue
dist.destroy_process_group()
