import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)

model = DDP(nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)

for step in range(100):
    x = torch.randn(8, 16)
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0 and rank == 0:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(f"step {step} loss {mean.item() / dist.get_world_size():.4f}")

dist.destroy_process_group()
