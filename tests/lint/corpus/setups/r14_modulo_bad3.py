import os

import torch
from torch import distributed as dist

rank = int(os.environ["RANK"])
num_gpus = torch.cuda.device_count()
torch.cuda.set_device(rank % num_gpus)
dist.init_process_group(backend="nccl")
device = torch.device("cuda", rank % num_gpus)
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(device), device_ids=[rank % num_gpus])
m(torch.randn(1, 2, device=device)).sum().backward()
dist.destroy_process_group()
