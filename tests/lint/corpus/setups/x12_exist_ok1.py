import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
os.makedirs("/tmp/out", exist_ok=True)
if not os.path.exists(f"/tmp/out/rank{dist.get_rank()}"):
    os.makedirs(f"/tmp/out/rank{dist.get_rank()}")
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
