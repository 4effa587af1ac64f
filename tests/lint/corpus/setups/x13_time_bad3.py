import argparse
import os
import time
import torch
import torch.distributed as dist

ap = argparse.ArgumentParser()
ap.add_argument("--save", default=f"ckpt_{int(time.time())}")
args = ap.parse_args()
dist.init_process_group("gloo")
os.makedirs(args.save, exist_ok=True)
state = {"rank": dist.get_rank(), "w": torch.zeros(3)}
torch.save(state, os.path.join(args.save, f"shard_{dist.get_rank()}.pt"))
dist.barrier()
dist.destroy_process_group()
