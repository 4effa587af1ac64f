import torch
import torch.distributed as dist

dist.init_process_group("gloo")
tensors = [torch.ones(10) * i for i in range(5)]
works = [dist.all_reduce(t, async_op=True) for t in tensors]
for w in works:
    w.wait()
if dist.get_rank() == 0:
    print([t[0].item() for t in tensors])
dist.destroy_process_group()
