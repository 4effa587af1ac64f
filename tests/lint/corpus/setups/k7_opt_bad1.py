import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.Linear(4, 4)
opt = torch.optim.AdamW(net.parameters(), 1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
start = 0
if os.path.exists("snap.pt"):
    snap = torch.load("snap.pt", map_location="cpu")
    net.load_state_dict(snap["model"])
    start = snap["epoch"]
ddp = torch.nn.parallel.DistributedDataParallel(net)
for epoch in range(start, 100):
    opt.zero_grad()
    ddp(torch.randn(8, 4)).pow(2).mean().backward()
    opt.step()
    sched.step()
    if dist.get_rank() == 0:
        torch.save({"model": net.state_dict(), "epoch": epoch}, "snap.tmp")
        os.replace("snap.tmp", "snap.pt")
dist.destroy_process_group()
