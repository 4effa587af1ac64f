import os
import subprocess

import torch
import torch.distributed as dist


def from_slurm():
    hosts = subprocess.check_output(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], text=True)
    os.environ["MASTER_ADDR"] = hosts.split()[0]
    os.environ["MASTER_PORT"] = str(15000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]


if "SLURM_PROCID" in os.environ and "RANK" not in os.environ:
    from_slurm()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
dist.destroy_process_group()
