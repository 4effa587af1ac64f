import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.randn(8, 4)).abs().log().mean()
    bad = (~torch.isfinite(loss.detach())).float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bad.item() > 0:
        continue
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
