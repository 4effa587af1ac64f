import torch
import torch.nn as nn
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


def batches(n, gen):
    for _ in range(n):
        size = int(torch.randint(0, 4, (1,), generator=gen))
        yield torch.randn(size, 4, generator=gen)


class Trainer:
    def __init__(self, net):
        self.net = DistributedDataParallel(net)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def run(self, stream):
        for batch in stream:
            if batch.numel() == 0:
                continue
            self.opt.zero_grad()
            self.net(batch).mean().backward()
            self.opt.step()


def main():
    td.init_process_group("gloo")
    g = torch.Generator().manual_seed(td.get_rank())
    Trainer(nn.Linear(4, 1)).run(batches(30, g))
    td.destroy_process_group()


if __name__ == "__main__":
    main()
