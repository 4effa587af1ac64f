import torch
import torch.nn as nn
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class GAN:
    def __init__(self):
        self.rank = td.get_rank()
        self.g = DistributedDataParallel(nn.Linear(4, 8))
        d = nn.Linear(8, 1)
        self.d = DistributedDataParallel(d) if self.rank % 2 == 0 else d
        self.opt = torch.optim.Adam(list(self.g.parameters()) + list(self.d.parameters()))

    def step(self):
        self.opt.zero_grad()
        self.d(self.g(torch.randn(3, 4))).mean().backward()
        self.opt.step()


if __name__ == "__main__":
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    gan = GAN()
    for _ in range(5):
        gan.step()
    td.destroy_process_group()
