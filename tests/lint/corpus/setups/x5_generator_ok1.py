import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
full = TensorDataset(torch.arange(100.0).unsqueeze(1))
train, val = random_split(full, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
sampler = DistributedSampler(train)
for epoch in range(2):
    sampler.set_epoch(epoch)
    s = torch.zeros(1)
    for (x,) in DataLoader(train, 8, sampler=sampler):
        s += x.sum()
    dist.all_reduce(s)
dist.destroy_process_group()
