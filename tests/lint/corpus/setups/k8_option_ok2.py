import argparse

import torch
import torch.distributed as dist

ap = argparse.ArgumentParser()
ap.add_argument("--resume", default=None)
args = ap.parse_args()
dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
start = 0
if args.resume:
    ck = torch.load(args.resume, map_location="cpu")
    net.load_state_dict(ck["net"])
    opt.load_state_dict(ck["opt"])
    start = ck["next_epoch"]
ddp = torch.nn.parallel.DistributedDataParallel(net)
for _ in range(start, 3):
    opt.zero_grad()
    ddp(torch.randn(2, 2)).sum().backward()
    opt.step()
dist.destroy_process_group()
