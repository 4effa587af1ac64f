import torch
import torch.distributed as dist

dist.init_process_group("gloo")
own, every = dist.new_subgroups(group_size=1)
t = torch.full((2,), float(dist.get_rank()))
dist.all_reduce(t, group=own)
if dist.get_rank() == 0:
    print(len(every), "groups", t.tolist())
dist.destroy_process_group()
