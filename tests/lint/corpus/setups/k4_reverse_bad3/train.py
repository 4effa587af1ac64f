import torch
import torch.distributed as dist

from ckpt import load, save

dist.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
model = torch.nn.parallel.DistributedDataParallel(net)
model(torch.ones(1, 2)).sum().backward()
save(model)
dist.barrier()
load(model)
dist.destroy_process_group()
