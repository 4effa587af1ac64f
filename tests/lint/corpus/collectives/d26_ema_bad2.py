import copy

import torch
from torch import distributed as td
from torch.nn.parallel import DistributedDataParallel


class EMA:
    def __init__(self, net, decay=0.99):
        self.shadow = copy.deepcopy(net).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for s, p in zip(self.shadow.parameters(), net.parameters()):
            s.lerp_(p, 1 - self.decay)


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    net = torch.nn.Linear(8, 1)
    ema = EMA(net)
    ddp = DistributedDataParallel(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        ddp(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
        ema.update(ddp.module)
    print(td.get_rank(), ema.shadow.weight.sum().item())
    td.destroy_process_group()


if __name__ == "__main__":
    main()
