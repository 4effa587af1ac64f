import os

import torch
import torch.distributed as dist

# LOCAL_RANK is generally 0 on one machine, DDP turns BatchNorm into SyncBatchNorm by itself,
# and torchrun --proc_per_node=4 starts us with MASTER_PORT 12355
dist.init_process_group("gloo")
node_rank = int(os.environ.get("GROUP_RANK", 0))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
net(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
