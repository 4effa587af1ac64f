import os

import torch
import torch.distributed as dist

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
net = torch.nn.Linear(3, 3).cuda()
net.load_state_dict(torch.load("init.pt", f"cuda:{local}"))
ema = torch.load("ema.pt", map_location=lambda storage, loc: storage)
net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[local])
net(torch.ones(1, 3).cuda()).sum().backward()
dist.destroy_process_group()
