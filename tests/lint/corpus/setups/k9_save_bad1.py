import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), 0.1)


def handler(sig, frame):
    if dist.get_rank() == 0:
        torch.save({"m": model.module.state_dict(), "o": opt.state_dict()}, "preempt.pt")
    sys.exit(0)


signal.signal(signal.SIGTERM, handler)
for _ in range(10000):
    opt.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    opt.step()
dist.destroy_process_group()
