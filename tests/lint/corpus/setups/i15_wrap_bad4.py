import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model, lr=1e-3):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.model = DistributedDataParallel(model)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr)

    def fit(self, steps):
        dist.init_process_group("gloo")
        for _ in range(steps):
            self.opt.zero_grad()
            self.model(torch.randn(4, 6)).mean().backward()
            self.opt.step()
        dist.destroy_process_group()


if __name__ == "__main__":
    Trainer(torch.nn.Linear(6, 2)).fit(20)
