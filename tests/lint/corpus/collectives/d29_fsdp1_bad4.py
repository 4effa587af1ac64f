import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
net = torch.nn.Linear(128, 128).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)
net = FSDP(net)

for _ in range(100):
    optimizer.zero_grad()
    net(torch.randn(16, 128, device="cuda")).pow(2).mean().backward()
    optimizer.step()

dist.destroy_process_group()
