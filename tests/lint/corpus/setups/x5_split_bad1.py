import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
torch.manual_seed(1337 + dist.get_rank())
full = TensorDataset(torch.randn(1000, 4), torch.randn(1000, 1))
train, val = random_split(full, [800, 200])
sampler = DistributedSampler(train)
loader = DataLoader(train, 20, sampler=sampler)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        opt.step()
dist.destroy_process_group()
