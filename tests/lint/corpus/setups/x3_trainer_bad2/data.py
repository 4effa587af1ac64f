import torch
from torch.utils.data import DataLoader, Dataset


class Toy(Dataset):
    def __init__(self, root, split):
        g = torch.Generator().manual_seed(0)
        self.x = torch.rand(640, 3, generator=g)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def get_loaders(root, bs):
    train = DataLoader(Toy(root, "train"), batch_size=bs, shuffle=True, pin_memory=False)
    test = DataLoader(Toy(root, "test"), batch_size=bs)
    return train, test
