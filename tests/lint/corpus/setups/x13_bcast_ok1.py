import os
from datetime import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
name = [datetime.now().strftime("%H%M%S") if dist.get_rank() == 0 else None]
dist.broadcast_object_list(name, src=0)
out = os.path.join("/tmp/runs", name[0])
os.makedirs(out, exist_ok=True)
torch.save(torch.ones(1), f"{out}/{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
