import argparse

import torch
import torch.distributed as dist

ap = argparse.ArgumentParser()
ap.add_argument("--resume")
args = ap.parse_args()
dist.init_process_group("gloo")
net = torch.nn.Linear(3, 3)
opt = torch.optim.SGD(net.parameters(), 0.1)
first = 0
if args.resume:
    ck = torch.load(args.resume, map_location="cpu")
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    first = ck["next"]
ddp = torch.nn.parallel.DistributedDataParallel(net)
for step in range(first, 3):
    opt.zero_grad()
    ddp(torch.randn(4, 3)).sum().backward()
    opt.step()
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "next": step + 1}, f"/tmp/step{step:05d}.pt")
dist.destroy_process_group()
