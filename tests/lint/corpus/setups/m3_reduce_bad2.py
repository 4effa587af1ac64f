import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau


def reduce_mean(value):
    t = torch.tensor(value)
    dist.all_reduce(t)
    return t.item()


class Loop:
    def __init__(self):
        self.net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)
        self.plateau = ReduceLROnPlateau(self.opt)

    def run(self):
        for _ in range(10):
            loss = self.net(torch.randn(4, 2)).abs().mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.plateau.step(reduce_mean(loss.item()))


dist.init_process_group("gloo")
Loop().run()
dist.destroy_process_group()
