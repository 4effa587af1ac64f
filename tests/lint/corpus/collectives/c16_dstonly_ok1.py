import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.tensor([1.0 + dist.get_rank()])
dist.reduce(loss, dst=0)
if dist.get_rank() == 0:
    print("mean", (loss / dist.get_world_size()).item())
dist.destroy_process_group()
