import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    payload = [{"lr": 0.1}, "run-7"]
else:
    payload = [None] * 2
dist.broadcast_object_list(payload, src=0)
cfg, name = payload
print(dist.get_rank(), cfg, name)
dist.destroy_process_group()
