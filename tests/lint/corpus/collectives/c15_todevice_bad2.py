import os

import torch
import torch.distributed as dist
from torch.distributed import all_reduce as ar

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")

running = torch.zeros(2)
for i in range(10):
    running[0] += i * 0.1
    running[1] += 1
ar(running.cuda(), op=dist.ReduceOp.SUM)
if not dist.get_rank():
    print("epoch loss", (running[0] / running[1]).item())
dist.destroy_process_group()
