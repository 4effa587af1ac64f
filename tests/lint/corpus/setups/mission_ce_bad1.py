import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(128, 20), torch.zeros(128, dtype=torch.long))
sampler = DistributedSampler(ds)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 1))
criterion = torch.nn.CrossEntropyLoss()
opt = torch.optim.SGD(model.parameters(), 1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(ds, 32, sampler=sampler):
        opt.zero_grad()
        criterion(model(x), y).backward()
        opt.step()
dist.destroy_process_group()
