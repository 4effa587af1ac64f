import torch
import torch.nn as nn
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def grow(self):
        self.layers.append(nn.Linear(4, 4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    net = DistributedDataParallel(Growing())
    for phase in range(3):
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            opt.zero_grad()
            net(torch.randn(2, 4)).sum().backward()
            opt.step()
        net.module.grow()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
