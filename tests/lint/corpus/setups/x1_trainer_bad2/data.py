import torch
from torch.utils import data as tdata


def build_loader(batch_size):
    ds = tdata.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
    sampler = tdata.DistributedSampler(ds)
    return tdata.DataLoader(ds, batch_size, sampler=sampler, drop_last=True)
