import os

import torch
from torch import distributed as tdist

nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
world = nodes * per_node
rank = int(os.environ["SLURM_PROCID"])
local = int(os.environ["SLURM_LOCALID"])

torch.cuda.set_device(local)
tdist.init_process_group(
    backend="nccl",
    init_method="tcp://127.0.0.1:23456",
    rank=rank,
    world_size=world,
)

net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[local])
optim = torch.optim.AdamW(net.parameters())
for step in range(1000):
    net(torch.randn(64, 8, device="cuda")).pow(2).mean().backward()
    optim.step()
    optim.zero_grad()
tdist.destroy_process_group()
