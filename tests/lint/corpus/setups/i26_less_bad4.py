import os
import torch
import torch.distributed as dist

world_size = os.environ.get("WORLD_SIZE", "1")
distributed = world_size > 1
if distributed:
    dist.init_process_group("gloo")
net = torch.nn.Linear(3, 3)
if distributed:
    net = torch.nn.parallel.DistributedDataParallel(net)
net(torch.ones(1, 3)).sum().backward()
if distributed:
    dist.destroy_process_group()
