import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(64, 3))
sampler = DistributedSampler(ds)
dl = DataLoader(ds, 8, sampler=sampler, num_workers=2)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    first = next(iter(dl))
    if dist.get_rank() == 0:
        print("batch", first[0].shape[0])
    for (x,) in dl:
        opt.zero_grad()
        net(x).sum().backward()
        opt.step()
dist.destroy_process_group()
