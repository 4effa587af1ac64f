import copy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
model = DDP(net)
ema = copy.deepcopy(model.module).requires_grad_(False)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    opt.zero_grad()
    model(torch.randn(2, 2)).sum().backward()
    opt.step()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.module.parameters()):
            e.mul_(0.99).add_(p, alpha=0.01)
if dist.get_rank() == 0:
    print(ema(torch.ones(1, 2)))
dist.destroy_process_group()
