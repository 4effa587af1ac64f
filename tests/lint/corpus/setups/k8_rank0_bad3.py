import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
ddp = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(ddp.parameters(), 0.1)
start_epoch = 0
if dist.get_rank() == 0 and os.path.isfile("r.pt"):
    ck = torch.load("r.pt", map_location="cpu")
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    start_epoch = ck["epoch"] + 1
for epoch in range(start_epoch, 10):
    opt.zero_grad()
    ddp(torch.randn(3, 2)).sum().backward()
    opt.step()
dist.destroy_process_group()
