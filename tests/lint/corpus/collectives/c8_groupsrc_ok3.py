import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
size = 2
groups = []
for first in range(0, world, size):
    groups.append(dist.new_group(list(range(first, min(first + size, world)))))

mine = groups[rank // size]
leader = rank // size * size
w = torch.full((2,), float(rank))
dist.broadcast(w, src=leader, group=mine)
print(rank, w.tolist())
dist.destroy_process_group()
