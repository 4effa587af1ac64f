import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self):
        self.model = DDP(torch.nn.Linear(2, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def valid(self, loss):
        return torch.isfinite(loss).all()

    def step(self, x):
        loss = self.model(x).pow(2).mean()
        if not self.valid(loss):
            self.opt.zero_grad()
            return None
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.item()

    def fit(self):
        for i in range(100):
            self.step(torch.randn(4, 2))


dist.init_process_group("gloo")
Trainer().fit()
dist.destroy_process_group()
