import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x))


class Trainer:
    def __init__(self):
        self.model = nn.parallel.DistributedDataParallel(Net())
        self.opt = torch.optim.Adam(self.model.parameters())

    def _run_batch(self, x, y):
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.opt.step()


dist.init_process_group("gloo")
t = Trainer()
t._run_batch(torch.randn(4, 10), torch.zeros(4, dtype=torch.long))
dist.destroy_process_group()
