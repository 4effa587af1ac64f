import os

import torch
import torch.distributed as dist

rank = int(os.environ["SLURM_PROCID"])
local = int(os.environ["SLURM_LOCALID"])
torch.cuda.set_device(local)
dist.init_process_group("nccl", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))
x = torch.ones(1).to(local)
dist.all_reduce(x)
dist.destroy_process_group()
