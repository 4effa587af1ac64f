import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
loss, acc = torch.tensor(1.0), torch.tensor(0.5)
if rank == 0:
    dist.all_reduce(loss)
    dist.all_reduce(acc)
else:
    dist.all_reduce(acc)
    dist.all_reduce(loss)
print(loss, acc)
dist.destroy_process_group()
