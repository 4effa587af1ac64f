import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
t = torch.ones(1)
dist.all_reduce(t)
print(t.item())
dist.destroy_process_group()
