import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(1234 + self.rank)
        self.model = DDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
        self.model.apply(self._init)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @staticmethod
    def _init(m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    def step(self):
        self.opt.zero_grad()
        self.model(torch.randn(4, 8)).pow(2).mean().backward()
        self.opt.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    t = Trainer()
    for _ in range(5):
        t.step()
    dist.destroy_process_group()
