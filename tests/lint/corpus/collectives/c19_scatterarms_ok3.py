import torch
import torch.distributed as dist


def shards(n):
    if dist.get_rank() != 0:
        return None
    return list(torch.arange(float(n * dist.get_world_size())).chunk(dist.get_world_size()))


dist.init_process_group("gloo")
mine = torch.empty(3)
dist.scatter(mine, shards(3), src=0)
print(dist.get_rank(), mine.tolist())
dist.destroy_process_group()
