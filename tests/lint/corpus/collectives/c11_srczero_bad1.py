import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
students = dist.new_group([2, 3])
w = torch.full((2,), float(rank))
if rank in (2, 3):
    # first member shares its weights
    dist.broadcast(w, src=0, group=students)
print(rank, w.tolist())
dist.destroy_process_group()
