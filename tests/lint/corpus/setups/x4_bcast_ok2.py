import random

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
box = [random.SystemRandom().randrange(2**31)]
dist.broadcast_object_list(box, src=0)
ds = TensorDataset(torch.randn(40, 2))
sampler = DistributedSampler(ds, seed=box[0])
for epoch in range(2):
    sampler.set_epoch(epoch)
    n = torch.tensor(sum(len(x) for (x,) in DataLoader(ds, 5, sampler=sampler)))
    dist.all_reduce(n)
dist.destroy_process_group()
