import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class T:
    def __init__(self):
        ds = TensorDataset(torch.randn(100, 4))
        self.loader = DataLoader(ds, 8, sampler=DistributedSampler(ds))
        self.it = iter(self.loader)
        self.model = DDP(torch.nn.Linear(4, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def batch(self):
        try:
            return next(self.it)
        except StopIteration:
            self.it = iter(self.loader)
            return next(self.it)

    def fit(self):
        for _ in range(1000):
            (x,) = self.batch()
            self.opt.zero_grad()
            self.model(x).sum().backward()
            self.opt.step()


dist.init_process_group("gloo")
T().fit()
dist.destroy_process_group()
