import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29501", rank=0, world_size=1)
t = torch.ones(1)
dist.all_reduce(t)
print("rank 0", t)
dist.destroy_process_group()
