import os

import torch
from torch import distributed as td
from torch.nn import parallel


class Trainer:
    def __init__(self):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        td.init_process_group("nccl")
        self.net = torch.nn.Linear(16, 2)
        self.ddp = parallel.DistributedDataParallel(
            self.net,
            device_ids=[self.local_rank],
            output_device=self.local_rank,
        )

    def step(self, x):
        return self.ddp(x.cuda()).sum()


if __name__ == "__main__":
    torch.manual_seed(0)
    t = Trainer()
    t.step(torch.randn(4, 16)).backward()
    td.destroy_process_group()
