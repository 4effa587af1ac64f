import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.rand(2)
outs = [torch.zeros(2) for _ in range(dist.get_world_size())]
dist.all_gather(outs, x)
if dist.get_rank() == 0:
    print(torch.cat(outs).sum().item())
dist.destroy_process_group()
