import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
sampler = DistributedSampler(ds)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(ds, 16, sampler=sampler):
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        opt.step()
dist.destroy_process_group()
