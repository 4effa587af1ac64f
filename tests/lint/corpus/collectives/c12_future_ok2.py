import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def mean_hook(state, bucket):
    world = dist.get_world_size()
    work = dist.all_reduce(bucket.buffer().div_(world), async_op=True)
    return work.get_future().then(lambda fut: fut.value()[0])


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(8, 2))
model.register_comm_hook(None, mean_hook)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    opt.step()
dist.destroy_process_group()
