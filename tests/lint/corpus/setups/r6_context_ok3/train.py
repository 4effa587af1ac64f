import torch
import torch.distributed as dist

from group import process_group

with process_group("gloo") as rank:
    x = torch.tensor(rank)
    dist.all_reduce(x)
