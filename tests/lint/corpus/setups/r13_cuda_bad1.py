import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
model = torch.nn.Linear(16, 4).cuda()
model = DistributedDataParallel(model)
opt = torch.optim.SGD(model.parameters(), 1e-2)
for _ in range(100):
    x = torch.randn(32, 16).cuda()
    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
if rank == 0:
    print("done")
dist.destroy_process_group()
