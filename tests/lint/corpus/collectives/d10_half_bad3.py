import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Loop:
    def __init__(self, local_rank):
        self.dev = torch.device(f"cuda:{local_rank}")
        self.model = DDP(torch.nn.Linear(32, 32).to(self.dev), device_ids=[local_rank])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self):
        for _ in range(10):
            self.opt.zero_grad()
            self.model(torch.randn(4, 32, device=self.dev)).sum().backward()
            self.opt.step()

    def offload_and_score(self):
        net = self.model.module.to("cpu")
        with torch.no_grad():
            score = net(torch.randn(4, 32)).mean().item()
        self.model.module.to(self.dev)
        return score


if __name__ == "__main__":
    lr = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    loop = Loop(lr)
    for _ in range(3):
        loop.train()
        print(dist.get_rank(), loop.offload_and_score())
    dist.destroy_process_group()
