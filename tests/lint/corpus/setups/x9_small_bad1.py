import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
few_shot = TensorDataset(torch.randn(4, 16), torch.arange(4))
sampler = DistributedSampler(few_shot, drop_last=True)
loader = DataLoader(few_shot, batch_size=8, sampler=sampler, drop_last=True)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
dist.destroy_process_group()
