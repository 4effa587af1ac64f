import contextlib

import torch
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class Accumulator:
    def __init__(self, net, every):
        self.net = DistributedDataParallel(net)
        self.every = every
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def micro(self, i, x):
        loss = self.net(x).pow(2).mean() / self.every
        last = (i + 1) % self.every == 0
        ctx = contextlib.nullcontext() if last else self.net.no_sync()
        with ctx:
            loss.backward()
        if last:
            self.opt.step()
            self.opt.zero_grad()


if __name__ == "__main__":
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    acc = Accumulator(torch.nn.Linear(8, 1), 4)
    for i in range(16):
        acc.micro(i, torch.randn(2, 8))
    td.destroy_process_group()
