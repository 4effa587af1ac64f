"""torchrun --nproc-per-node 2 main.py"""
import torch
import torch.distributed as dist

from net import init

init()
x = torch.ones(2)
dist.all_reduce(x)
dist.destroy_process_group()
