import torch
import torch.distributed as dist


def mean_everywhere(t):
    dist.reduce(t, dst=0)
    if dist.get_rank() == 0:
        t /= dist.get_world_size()
    dist.broadcast(t, src=0)
    return t.item()


dist.init_process_group("gloo")
print(dist.get_rank(), mean_everywhere(torch.ones(1) * dist.get_rank()))
dist.destroy_process_group()
