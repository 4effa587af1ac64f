import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
train_dataset = TensorDataset(torch.randn(100, 3))
train_sampler = DistributedSampler(train_dataset)
train_loader = DataLoader(
    train_dataset,
    batch_size=10,
    shuffle=True,
    sampler=train_sampler,
    num_workers=0,
)
for epoch in range(2):
    train_sampler.set_epoch(epoch)
    for (x,) in train_loader:
        s = x.sum()
        dist.all_reduce(s)
dist.destroy_process_group()
