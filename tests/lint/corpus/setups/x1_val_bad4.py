import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
train_ds, val_ds = TensorDataset(torch.randn(256, 4)), TensorDataset(torch.randn(64, 4))
train_sampler = DistributedSampler(train_ds)
val_sampler = DistributedSampler(val_ds, shuffle=False)
train_loader = DataLoader(train_ds, 16, sampler=train_sampler)
val_loader = DataLoader(val_ds, 16, sampler=val_sampler)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(5):
    val_sampler.set_epoch(epoch)
    net.train()
    for (x,) in train_loader:
        opt.zero_grad()
        net(x).sum().backward()
        opt.step()
    net.eval()
    total = torch.zeros(1)
    with torch.no_grad():
        for (x,) in val_loader:
            total += net(x).sum()
    dist.all_reduce(total)
dist.destroy_process_group()
