import argparse

import torch
import torch.distributed as dist

ap = argparse.ArgumentParser(description="Two terminals: --rank 0 and --rank 1")
ap.add_argument("--rank", type=int, required=True)
ap.add_argument("--world-size", type=int, default=2)
ap.add_argument("--init-method", default="file:///nfs/home/shared/sync_file")
opts = ap.parse_args()

dist.init_process_group(
    "gloo",
    init_method=opts.init_method,
    world_size=opts.world_size,
    rank=opts.rank,
)
buf = torch.zeros(3)
if opts.rank == 0:
    buf += 7
dist.broadcast(buf, src=0)
print(opts.rank, buf)
dist.destroy_process_group()
