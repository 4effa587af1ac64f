import torch
import torch.distributed as dist


def make_groups(size):
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = None
    for start in range(0, world, size):
        ranks = list(range(start, min(start + size, world)))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


dist.init_process_group("gloo")
g = make_groups(2)
t = torch.ones(1)
dist.all_reduce(t, group=g)
print(dist.get_rank(), t.item())
dist.destroy_process_group()
