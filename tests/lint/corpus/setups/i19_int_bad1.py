import torch
import torch.distributed as dist

dist.init_process_group(backend="gloo", init_method="env://", timeout=1800)
x = torch.ones(3)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print(x)
dist.barrier()
dist.destroy_process_group()
