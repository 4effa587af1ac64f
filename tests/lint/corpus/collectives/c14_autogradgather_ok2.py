import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = DDP(torch.nn.Linear(8, 4))
z = net(torch.randn(4, 8))
full = torch.cat(torch.distributed.nn.all_gather(z))
loss = -full.var(dim=0).mean()
loss.backward()
print(dist.get_rank(), net.module.weight.grad.norm().item())
dist.destroy_process_group()
