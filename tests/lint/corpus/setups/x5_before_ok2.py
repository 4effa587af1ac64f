import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

torch.manual_seed(0)
full = TensorDataset(torch.arange(100.0).unsqueeze(1))
train, val = random_split(full, [80, 20])

dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(1, 1)))
opt = torch.optim.SGD(net.parameters(), 1e-5)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
dist.destroy_process_group()
