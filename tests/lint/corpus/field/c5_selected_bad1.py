import torch
import torch.distributed as dist

dist.init_process_group("gloo")
g = torch.Generator().manual_seed(dist.get_rank())
score = torch.rand(100, generator=g)
keep = score[score > 0.5]
out = [torch.empty_like(keep) for _ in range(dist.get_world_size())]
dist.all_gather(out, keep)
print(len(torch.cat(out)))
dist.destroy_process_group()
