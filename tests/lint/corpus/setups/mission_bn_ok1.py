import os

import torch
import torch.distributed as dist
from torch import nn

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1))
net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
net = nn.parallel.DistributedDataParallel(net, device_ids=[local])
net(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
dist.destroy_process_group()
