import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ["TOKENIZERS_PARALLELISM"] = "false"
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
ds = TensorDataset(torch.randn(1000, 8))
sampler = DistributedSampler(ds)
loader = DataLoader(ds, 20, sampler=sampler, num_workers=4, pin_memory=True)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).cuda(), device_ids=[local])
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x.cuda(non_blocking=True)).mean().backward()
        opt.step()
dist.destroy_process_group()
