import torch
import torch.distributed as dist
import torch.nn as nn


class Trainer:
    def __init__(self):
        dist.init_process_group(backend="nccl")
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.net = nn.parallel.DistributedDataParallel(nn.Linear(3, 3).to(self.device), device_ids=[0])
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, x):
        self.opt.zero_grad()
        loss = self.net(x.to(self.device)).sum()
        loss.backward()
        self.opt.step()


if __name__ == "__main__":
    t = Trainer()
    for _ in range(10):
        t.step(torch.randn(4, 3))
    dist.destroy_process_group()
