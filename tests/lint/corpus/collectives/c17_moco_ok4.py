import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local_rank}")
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
with torch.no_grad():
    keys = torch.randn(4, 8, device=device)
    bank = torch.empty(4 * dist.get_world_size(), 8, device=device)
    dist.all_gather_into_tensor(bank, keys)
    summary = bank.mean().cpu()
print(dist.get_rank(), summary.item())
dist.destroy_process_group()
