import os
import shutil

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    if os.path.exists("/tmp/fresh"):
        shutil.rmtree("/tmp/fresh")
    os.makedirs("/tmp/fresh")
dist.barrier()
torch.save(torch.ones(1), f"/tmp/fresh/{dist.get_rank()}.pt")
dist.destroy_process_group()
