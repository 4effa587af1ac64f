import os

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, all_reduce
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(dist.get_rank())
net = DistributedDataParallel(torch.nn.Linear(128, 10).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")

for it in range(1000):
    images = torch.randn(64, 128, device="cuda")
    labels = torch.randint(0, 10, (64,), device="cuda")
    with torch.autocast("cuda"):
        criterion = torch.nn.functional.cross_entropy(net(images), labels)
    all_reduce(criterion, op=ReduceOp.AVG)
    opt.zero_grad()
    scaler.scale(criterion).backward()
    scaler.step(opt)
    scaler.update()
    if it % 100 == 0 and dist.get_rank() == 0:
        print(it, criterion.item())

dist.destroy_process_group()
