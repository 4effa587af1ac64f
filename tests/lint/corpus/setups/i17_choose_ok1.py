import os

import torch
import torch.distributed as dist

use_cuda = torch.cuda.is_available()
backend = "nccl" if use_cuda else "gloo"
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(device)
dist.init_process_group(backend)
t = torch.ones(1, device=device)
dist.all_reduce(t)
dist.destroy_process_group()
