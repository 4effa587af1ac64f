import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local_rank}")
dist.init_process_group("nccl", device_id=device)
net = torch.nn.Linear(4, 4, device=device)
net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[device])
net(torch.randn(2, 4, device=device)).sum().backward()
dist.destroy_process_group()
