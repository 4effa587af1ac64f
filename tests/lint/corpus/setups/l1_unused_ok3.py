import argparse
import os

import torch
import torch.distributed as dist

ap = argparse.ArgumentParser()
ap.add_argument("--lr", type=float, default=0.1)
args, rest = ap.parse_known_args()
local_rank = int(os.environ["LOCAL_RANK"])
use_cuda = torch.cuda.is_available()
if use_cuda:
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl" if use_cuda else "gloo")
t = torch.ones(1, device="cuda" if use_cuda else "cpu")
dist.all_reduce(t)
dist.destroy_process_group()
