import os
import signal
import sys

import torch
import torch.distributed as dist


def on_term(signum, frame):
    print("preempted, bye")
    sys.exit(0)


signal.signal(signal.SIGTERM, on_term)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), 0.01)
for it in range(500_000):
    opt.zero_grad()
    model(torch.randn(8, 64)).pow(2).mean().backward()
    opt.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "last.pt")
dist.destroy_process_group()
