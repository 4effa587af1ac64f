import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 2), nn.Linear(2, 8)

    def loss(self, x):
        return (self.dec(self.enc(x)) - x).pow(2).mean()

    def forward(self, x, mode="loss"):
        return self.loss(x) if mode == "loss" else self.enc(x)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(AutoEncoder())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(4, 8), mode="loss").backward()
    opt.step()
dist.destroy_process_group()
