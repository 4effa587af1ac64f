import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.rand(2)
parts = None
if rank == 0:
    parts = [torch.zeros(2) for _ in range(world)]
dist.gather(x, parts, dst=0)
if rank == 0:
    dist.gather(x, gather_list=[torch.zeros(2) for _ in range(world)])
else:
    dist.gather(x)
if parts is not None:
    print(torch.stack(parts))
dist.destroy_process_group()
