import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

dist.init_process_group("gloo")
world = dist.get_world_size()
total = funcol.all_reduce(torch.tensor([1.0 + dist.get_rank()]), "sum", list(range(world)))
parts = [torch.zeros(1) for _ in range(world)]
dist.all_gather(parts, torch.tensor([float(dist.get_rank())]))
if dist.get_rank() == 0:
    print(total.item(), [p.item() for p in parts])
dist.destroy_process_group()
