import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tail = dist.new_group([1])
t = torch.full((2,), float(rank))
if rank == 1:
    dist.broadcast(t, src=dist.get_global_rank(tail, 0), group=tail)
    print(t.tolist())
dist.destroy_process_group()
