import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Budgeted:
    def __init__(self, seconds):
        self.deadline = time.monotonic() + seconds
        self.model = DDP(torch.nn.Linear(16, 16))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def out_of_time(self):
        return time.monotonic() > self.deadline

    def run(self):
        steps = 0
        while not self.out_of_time():
            self.opt.zero_grad()
            self.model(torch.randn(32, 16)).mean().backward()
            self.opt.step()
            steps += 1
        return steps


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    print(dist.get_rank(), Budgeted(2.0).run())
    dist.destroy_process_group()
