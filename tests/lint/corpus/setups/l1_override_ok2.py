import argparse
import os

import torch
import torch.distributed as dist

ap = argparse.ArgumentParser()
ap.add_argument("--local_rank", "--local-rank", dest="local_rank", type=int, default=0)
ap.add_argument("--steps", type=int, default=10)
args = ap.parse_args()
if "LOCAL_RANK" in os.environ:
    args.local_rank = int(os.environ["LOCAL_RANK"])

torch.cuda.set_device(args.local_rank)
dist.init_process_group("nccl")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[args.local_rank])
for _ in range(args.steps):
    net(torch.ones(1, 2).cuda()).sum().backward()
dist.destroy_process_group()
