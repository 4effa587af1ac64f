import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
node_dir = os.path.join("/tmp", f"node_{os.environ.get('GROUP_RANK', '0')}")
if local_rank == 0:
    os.makedirs(node_dir, exist_ok=True)
    torch.save(torch.ones(3), os.path.join(node_dir, "vocab.pt"))
dist.barrier()
v = torch.load(os.path.join(node_dir, "vocab.pt"), map_location="cpu")
dist.all_reduce(v)
dist.destroy_process_group()
