import torch
import torch.distributed as dist

import comm


class Trainer:
    def __init__(self, out):
        self.out = out
        self.is_main = comm.is_main_process()
        self._init_dist()
        self.net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))

    def _init_dist(self):
        dist.init_process_group("gloo")

    def fit(self):
        self.net(torch.ones(1, 3)).sum().backward()
        if self.is_main:
            torch.save(self.net.module.state_dict(), self.out + ".pt")
        dist.destroy_process_group()
