import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
model = DDP(net, device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    opt.zero_grad()
    model(torch.randn(4, 4, device="cuda")).sum().backward()
    opt.step()
dist.destroy_process_group()
