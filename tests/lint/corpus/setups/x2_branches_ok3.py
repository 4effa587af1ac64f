import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build(ds, ddp):
    if ddp:
        return DataLoader(ds, 8, sampler=DistributedSampler(ds))
    return DataLoader(ds, 8, shuffle=True)


dist.init_process_group("gloo")
loader = build(TensorDataset(torch.randn(32, 2)), dist.get_world_size() > 1)
for epoch in range(2):
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    s = torch.zeros(2)
    for (x,) in loader:
        s += x.sum(0)
    dist.all_reduce(s)
dist.destroy_process_group()
