import torch
import torch.distributed as dist


def mean(x):
    y = x.clone()
    dist.all_reduce(y)
    return y / dist.get_world_size()


dist.init_process_group("gloo")
vals = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
rank = dist.get_rank()
msg = rank == 0 and ", ".join(f"{k}={mean(v):.3f}" for k, v in vals.items())
if msg:
    print(msg)
dist.destroy_process_group()
