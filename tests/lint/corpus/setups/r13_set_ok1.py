import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
model(torch.randn(2, 4).cuda()).sum().backward()
dist.destroy_process_group()
