import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def init_dist():
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def fit_fold(fold):
    init_dist()
    torch.manual_seed(fold)
    model = DDP(torch.nn.Linear(12, 1))
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(30):
        opt.zero_grad()
        model(torch.randn(16, 12)).abs().mean().backward()
        opt.step()


for fold in range(5):
    fit_fold(fold)
dist.destroy_process_group()
