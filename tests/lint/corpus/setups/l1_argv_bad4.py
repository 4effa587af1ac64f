import sys

import torch
import torch.distributed as dist

# torchrun --nproc_per_node=8 pretrain.py
local_rank = 0
for arg in sys.argv[1:]:
    if arg.startswith("--local_rank="):
        local_rank = int(arg.split("=")[1])

torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[local_rank])
model(torch.randn(2, 4).cuda()).sum().backward()
dist.destroy_process_group()
