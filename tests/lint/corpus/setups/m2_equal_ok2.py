import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.randn(16, 4)
loss = x.pow(2).mean()
dist.all_reduce(loss)
loss /= dist.get_world_size()
if dist.get_rank() == 0:
    print("mean over 16 samples a rank", loss.item())
dist.destroy_process_group()
