import torch
import torch.distributed as dist
from torch.utils import tensorboard as tb


class Trainer:
    def __init__(self, logdir="runs/base"):
        self.writer = tb.SummaryWriter(logdir)
        self.net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        self.opt = torch.optim.SGD(self.net.parameters(), 0.1)

    def run(self, n):
        for i in range(n):
            self.opt.zero_grad()
            self.net(torch.randn(2, 3)).sum().backward()
            self.opt.step()
            self.writer.add_scalar("lr", self.opt.param_groups[0]["lr"], i)


dist.init_process_group("gloo")
Trainer().run(10)
dist.destroy_process_group()
