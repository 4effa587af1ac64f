import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.rand(1).item()
t = torch.tensor([loss])
dist.all_reduce(t)
loss = t.item() / dist.get_world_size()
box = [loss]
dist.broadcast_object_list(box, src=0)
print(dist.get_rank(), box[0])
dist.destroy_process_group()
