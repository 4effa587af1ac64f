import os
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Loop:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = int(os.environ["RANK"])
        self.ds = TensorDataset(torch.randn(300, 2))
        self.sampler = DistributedSampler(self.ds)
        self.loader = DataLoader(self.ds, 10, sampler=self.sampler)
        self.net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch * 1000 + self.rank)
            for (x,) in self.loader:
                self.opt.zero_grad()
                self.net(x).mean().backward()
                self.opt.step()


loop = Loop()
loop.run(4)
dist.destroy_process_group()
