import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def sample(model, n):
    model.eval()
    with torch.no_grad():
        out = model.module(torch.randn(n, 8))
    model.train()
    return out


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    opt.step()
if dist.get_rank() == 0:
    print(sample(model, 2).shape)
    torch.save(model.module.state_dict(), "/tmp/linear_final.pt")
dist.destroy_process_group()
