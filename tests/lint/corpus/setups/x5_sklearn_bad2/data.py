import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load():
    table = np.random.RandomState(0).rand(400, 6).astype("float32")
    tr, va = train_test_split(table, test_size=0.2)
    ds = TensorDataset(torch.from_numpy(tr))
    return DataLoader(ds, 16, sampler=DistributedSampler(ds)), torch.from_numpy(va)
