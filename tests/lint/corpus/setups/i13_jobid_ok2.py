import os

import torch
import torch.distributed as dist

rank = int(os.environ["SLURM_PROCID"])
world = int(os.environ["SLURM_NTASKS"])
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
sync = f"{os.environ['SCRATCH']}/sync_{os.environ['SLURM_JOB_ID']}_{attempt}"
dist.init_process_group("gloo", init_method="file://" + sync, rank=rank, world_size=world)
x = torch.ones(1)
dist.all_reduce(x)
if rank == 0:
    print("alive:", int(x.item()))
dist.destroy_process_group()
