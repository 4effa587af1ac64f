import os
import signal

import torch
import torch.distributed as dist

stop = False


def on_term(signum, frame):
    global stop
    stop = True


signal.signal(signal.SIGTERM, on_term)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(20):
    opt.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    opt.step()
    flag = torch.tensor(int(stop))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item():
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "step": step + 1}
            torch.save(state, "/tmp/r7.tmp")
            os.replace("/tmp/r7.tmp", "/tmp/r7.pt")
        break
dist.destroy_process_group()
