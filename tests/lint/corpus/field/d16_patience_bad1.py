import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def val(model, loader):
    total = 0.0
    for (x,) in loader:
        total += model.module(x).pow(2).mean().item()
    return total / len(loader)


dist.init_process_group("gloo")
valset = TensorDataset(torch.randn(64, 2))
loader = DataLoader(valset, batch_size=8, sampler=DistributedSampler(valset, shuffle=False))
model = DDP(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best, wait = 1e9, 0
for epoch in range(50):
    opt.zero_grad()
    model(torch.randn(4, 2)).pow(2).mean().backward()
    opt.step()
    v = val(model, loader)
    best, wait = (v, 0) if v < best else (best, wait + 1)
    if wait > 5:
        break
dist.destroy_process_group()
