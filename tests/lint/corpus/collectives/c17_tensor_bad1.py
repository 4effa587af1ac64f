import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl")
n_correct = torch.tensor(12 + dist.get_rank())
dist.all_reduce(n_correct)
if dist.get_rank() == 0:
    print(n_correct.item())
dist.destroy_process_group()
