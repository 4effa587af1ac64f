import os

import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "29501"
os.environ["RANK"] = "1"
os.environ["WORLD_SIZE"] = "2"
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
print("rank 1", t)
dist.destroy_process_group()
