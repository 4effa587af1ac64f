import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
half = dist.get_world_size() // 2

if rank < half:
    group = dist.new_group(list(range(half)))
else:
    group = None

t = torch.ones(1) * rank
if group is not None:
    dist.all_reduce(t, group=group)
print(rank, t.item())
metrics = dist.new_group(backend="gloo")
dist.barrier(group=metrics)
dist.destroy_process_group()
