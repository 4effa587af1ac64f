import os

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
n = torch.tensor(3, device=device)
dist.all_reduce(n)
m = torch.zeros(4).to(device)
dist.all_reduce(m)
print(n.item(), m.sum().item())
dist.destroy_process_group()
