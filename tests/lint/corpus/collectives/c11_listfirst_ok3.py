import torch
import torch.distributed as dist

dist.init_process_group("gloo")
odd = [r for r in range(dist.get_world_size()) if r % 2]
group = dist.new_group(odd)
v = torch.rand(3)
if dist.get_rank() in odd:
    dist.broadcast(v, src=odd[0], group=group)
print(dist.get_rank(), v.sum().item())
dist.destroy_process_group()
