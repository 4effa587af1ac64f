import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
learners = list(range(world // 2, world))
group = dist.new_group(learners)
if rank in learners:
    torch.manual_seed(rank)
    model = DDP(nn.Linear(4, 1), process_group=group)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        opt.step()
dist.barrier()
dist.destroy_process_group()
