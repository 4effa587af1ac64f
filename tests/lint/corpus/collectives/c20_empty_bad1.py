import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    objects = [{"lr": 0.1}, "run-7"]
else:
    objects = []
dist.broadcast_object_list(objects, src=0)
print(dist.get_rank(), objects)
dist.destroy_process_group()
