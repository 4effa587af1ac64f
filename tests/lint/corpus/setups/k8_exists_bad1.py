import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
ddp = torch.nn.parallel.DistributedDataParallel(net)
start = 0
if os.path.exists("/local/ckpt/last.pt"):
    ck = torch.load("/local/ckpt/last.pt", map_location="cpu")
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    start = ck["next"]
for ep in range(start, 20):
    opt.zero_grad()
    ddp(torch.randn(4, 2)).sum().backward()
    opt.step()
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "next": ep + 1}, "/local/ckpt/last.tmp")
        os.replace("/local/ckpt/last.tmp", "/local/ckpt/last.pt")
dist.destroy_process_group()
