import os

import torch
from torch import distributed as td
from torch.distributed import fsdp


class Trainer:
    def __init__(self):
        self.rank = td.get_rank()
        self.net = fsdp.FullyShardedDataParallel(torch.nn.Linear(256, 256).cuda())
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self):
        self.net(torch.randn(4, 256, device="cuda")).mean().backward()
        self.opt.step()
        self.opt.zero_grad()

    def log_weights(self):
        if self.rank != 0:
            return
        with fsdp.FullyShardedDataParallel.summon_full_params(self.net):
            norm = sum(p.norm().item() for p in self.net.parameters())
        print("weight norm", norm)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    td.init_process_group("nccl")
    t = Trainer()
    for _ in range(5):
        t.step()
        t.log_weights()
    td.destroy_process_group()
