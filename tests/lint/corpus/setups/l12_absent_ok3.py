import os

import torch
import torch.distributed as dist

if "MASTER_ADDR" not in os.environ:
    os.environ["MASTER_ADDR"] = "localhost"
if "MASTER_PORT" not in os.environ:
    os.environ["MASTER_PORT"] = "29512"
rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
dist.init_process_group("gloo", rank=rank, world_size=world)
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
