import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def step(model, opt, x, i):
    if i < 2:
        lr = 0.01
    else:
        lr = 0.1
    for g in opt.param_groups:
        g["lr"] = lr
    loss = model(x).pow(2).mean()
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {loss.item()} on rank {dist.get_rank()} at step {i}")
    opt.zero_grad()
    loss.backward()
    opt.step()


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = DDP(nn.Linear(4, 1))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(10):
    step(net, sgd, torch.randn(8, 4), i)
dist.destroy_process_group()
