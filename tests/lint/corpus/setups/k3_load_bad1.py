import os

import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = torch.nn.Linear(100, 10).cuda()
opt = torch.optim.AdamW(model.parameters())
if os.environ.get("RESUME"):
    ckpt = torch.load(os.environ["RESUME"])
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
model(torch.randn(2, 100).cuda()).sum().backward()
dist.destroy_process_group()
