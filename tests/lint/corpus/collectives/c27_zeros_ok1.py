import torch
import torch.distributed as dist


def evaluate(samples):
    s = torch.zeros(2)
    if samples:
        s[0] = torch.stack(samples).sum()
        s[1] = len(samples)
    dist.all_reduce(s)
    if s[1] == 0:
        return None
    return (s[0] / s[1]).item()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = [torch.ones(1)][rank::world]
print(rank, evaluate(data))
dist.destroy_process_group()
