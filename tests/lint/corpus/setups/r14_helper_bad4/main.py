import torch
import torch.distributed as dist

from distenv import get_rank, init

init()
device = f"cuda:{get_rank()}"
net = torch.nn.Linear(6, 3).to(device)
ddp = torch.nn.parallel.DistributedDataParallel(net, device_ids=[get_rank()])
ddp(torch.randn(2, 6, device=device)).sum().backward()
dist.destroy_process_group()
