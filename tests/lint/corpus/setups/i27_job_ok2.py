import os

import torch
import torch.distributed as dist

job = int(os.environ["SLURM_JOB_ID"])
os.environ["MASTER_PORT"] = str(20000 + job % 40000)
os.environ["MASTER_ADDR"] = os.environ["HEAD_NODE"]
dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
x = torch.zeros(1)
dist.all_reduce(x)
dist.destroy_process_group()
