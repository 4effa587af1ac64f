import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
seed = 42 + rank
torch.manual_seed(seed)
ds = TensorDataset(torch.arange(1000.0))
sampler = DistributedSampler(ds, seed=seed)
loader = DataLoader(ds, batch_size=20, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    s = torch.zeros(1)
    for (x,) in loader:
        s += x.sum()
    dist.all_reduce(s)
dist.destroy_process_group()
