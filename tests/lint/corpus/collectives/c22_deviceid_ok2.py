import os

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=device)
dist.barrier(device_ids=[device.index])
x = torch.ones(1, device=device)
dist.all_reduce(x)
print(dist.get_rank(), x.item())
dist.destroy_process_group()
