import os

import torch
import torch.distributed as dist

raw = os.getenv("RANK", "0")
rank = int(raw)
world = os.environ.get("WORLD_SIZE")
if world and int(world) > 1:
    dist.init_process_group("gloo")
    x = torch.tensor(rank)
    dist.all_reduce(x)
    if rank == 0:
        print("sum", x.item(), "raw", raw)
    dist.destroy_process_group()
