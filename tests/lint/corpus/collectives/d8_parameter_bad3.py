import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, vocab):
        self.emb = nn.Embedding(vocab, 8)
        self.net = nn.Sequential(self.emb, nn.Linear(8, 1))
        self.ddp = DDP(self.net)
        self.extend(4)
        self.opt = torch.optim.SGD(self.ddp.parameters(), lr=0.1)

    def extend(self, n):
        old = self.ddp.module[0].weight.data
        self.ddp.module[0].weight = nn.Parameter(torch.cat([old, torch.randn(n, 8)]))

    def step(self):
        ids = torch.randint(0, 14, (5,))
        self.opt.zero_grad()
        self.ddp(ids).mean().backward()
        self.opt.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    t = Trainer(10)
    for _ in range(5):
        t.step()
    dist.destroy_process_group()
