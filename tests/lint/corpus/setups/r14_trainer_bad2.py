import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, optimizer_cls=torch.optim.SGD):
        self.gpu_id = int(os.environ["RANK"])
        self.model = model.to(self.gpu_id)
        self.model = DDP(self.model, device_ids=[self.gpu_id])
        self.opt = optimizer_cls(self.model.parameters(), lr=1e-3)

    def batch(self, x):
        self.opt.zero_grad()
        self.model(x.to(self.gpu_id)).mean().backward()
        self.opt.step()


if __name__ == "__main__":
    dist.init_process_group("nccl")
    tr = Trainer(torch.nn.Linear(20, 1))
    for _ in range(64):
        tr.batch(torch.randn(32, 20))
    dist.destroy_process_group()
