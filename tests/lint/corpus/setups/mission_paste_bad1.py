import torch
import torch.distributed as dist

dist.init_process_group("gloo")
>>> x = torch.ones(1)
dist.all_reduce(x)
print "sum", x
dist.destroy_process_group()
