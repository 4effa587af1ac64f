import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
seed = torch.tensor([rank * 17 + 3])
dist.broadcast(seed, src=rank)
torch.manual_seed(int(seed))
print(torch.rand(2))
dist.destroy_process_group()
