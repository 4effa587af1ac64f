import datetime
import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group(
    backend="nccl",
    timeout=datetime.timedelta(milliseconds=1800),
)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10).cuda(), device_ids=[local_rank])
model(torch.randn(5, 10).cuda()).sum().backward()
dist.destroy_process_group()
