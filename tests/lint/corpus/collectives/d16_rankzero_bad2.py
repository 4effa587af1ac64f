import torch
import torch.nn as nn
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.bad, self.best = patience, 0, None

    def __call__(self, value):
        if self.best is None or value < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    net = DistributedDataParallel(nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    stopper = EarlyStopping(2)
    for _ in range(200):
        loss = net(torch.randn(4, 4)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if td.get_rank() == 0 and stopper(loss.item()):
            print("stopping")
            break
    td.destroy_process_group()


if __name__ == "__main__":
    main()
