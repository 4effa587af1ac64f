import os

import torch
import torch.distributed as dist

for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "RANK": "0", "WORLD_SIZE": "1"}.items():
    os.environ.setdefault(key, value)
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
dist.destroy_process_group()
