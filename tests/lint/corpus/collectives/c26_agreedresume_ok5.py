import os

import torch
import torch.distributed as dist


def everyone_has(path):
    have = torch.tensor([int(os.path.exists(path))])
    dist.all_reduce(have, op=dist.ReduceOp.MIN)
    return bool(have)


def start_values(path):
    if everyone_has(path):
        return torch.load(path, map_location="cpu", weights_only=True)
    t = torch.randn(4) if dist.get_rank() == 0 else torch.empty(4)
    dist.broadcast(t, src=0)
    return t


dist.init_process_group("gloo")
print(dist.get_rank(), start_values("/nowhere/start.pt").tolist())
dist.destroy_process_group()
