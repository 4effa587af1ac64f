import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)

dist.init_process_group("nccl")
torch.cuda.set_device(local_rank)
model = torch.nn.Linear(6, 6).to(f"cuda:{local_rank}")
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
model(torch.randn(2, 6, device="cuda")).sum().backward()
dist.destroy_process_group()
