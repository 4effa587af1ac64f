import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
if dist.get_rank() == 0:
    os.makedirs("runs", exist_ok=True)
dist.barrier()
torch.cuda.set_device(local_rank)
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
print(x.item())
dist.destroy_process_group()
