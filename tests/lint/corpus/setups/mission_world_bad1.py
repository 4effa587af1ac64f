import os

import torch
import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "29501"
os.environ["RANK"] = "0"
os.environ["WORLD_SIZE"] = "2"

# arguments win over the variables, so there is no conflict
dist.init_process_group(backend="gloo", rank=0, world_size=1)
print(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
