import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank = dist.get_rank()
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
ddp_model = DDP(torch.nn.Linear(5, 5).cuda(), device_ids=[local_rank])
map_location = {"cuda:%d" % 0: "cuda:%d" % rank}
ddp_model.module.load_state_dict(torch.load("m.ckpt", map_location=map_location))
ddp_model(torch.randn(1, 5).cuda()).sum().backward()
dist.destroy_process_group()
