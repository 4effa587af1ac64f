import os

import torch
import torch.distributed as dist
import torch.nn as nn

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
net = nn.Linear(4, 1).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank() + 10)
for _ in range(5):
    opt.zero_grad()
    net(torch.randn(4, 4, device="cuda")).pow(2).mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    opt.step()
dist.destroy_process_group()
