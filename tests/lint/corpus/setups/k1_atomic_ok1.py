import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    opt.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    opt.step()
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch + 1}
        torch.save(state, "/tmp/k1.pt.tmp")
        os.replace("/tmp/k1.pt.tmp", "/tmp/k1.pt")
dist.destroy_process_group()
