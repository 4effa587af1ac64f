import torch
import torch.distributed as dist

dist.init_process_group("gloo")
counts = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(counts, async_op=True)
print("total", counts.sum().item())
dist.destroy_process_group()
