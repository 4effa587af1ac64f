import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.rand(1).item()
dist.all_reduce(loss)
print(dist.get_rank(), loss)
dist.destroy_process_group()
