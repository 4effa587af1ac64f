import torch
import torch.nn as nn
from torch import distributed as td
from torch.distributed import fsdp


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.relu(self.fc(x))


class Experiment:
    def __init__(self):
        self.net = nn.Sequential(*[Block(16) for _ in range(3)])
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.shard()

    def shard(self):
        for block in self.net:
            fsdp.fully_shard(block)
        fsdp.fully_shard(self.net)

    def step(self):
        self.net(torch.randn(4, 16)).mean().backward()
        self.opt.step()
        self.opt.zero_grad()


if __name__ == "__main__":
    td.init_process_group("gloo")
    torch.manual_seed(0)
    e = Experiment()
    for _ in range(5):
        e.step()
    td.destroy_process_group()
