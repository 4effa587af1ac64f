import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--nnodes", type=int, default=1)
parser.add_argument("--master", default=None)
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--world", type=int, default=1)
parser.add_argument("--port", default="29544")
args = parser.parse_args()

if args.nnodes == 1:
    addr = "127.0.0.1"
else:
    if args.master is None:
        parser.error("--master is required with more than one node")
    addr = args.master
dist.init_process_group("gloo", init_method=f"tcp://{addr}:{args.port}", rank=args.rank, world_size=args.world)
x = torch.ones(2)
dist.all_reduce(x)
print(f"[{args.rank}] {x.tolist()}")
dist.destroy_process_group()
