import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
is_master = dist.get_rank() == 0

net = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
net = FSDP(net.cuda(), auto_wrap_policy=policy)
optim = torch.optim.AdamW(net.parameters(), lr=3e-4)

for step in range(200):
    out = net(torch.randn(4, 1024, device="cuda"))
    out.square().mean().backward()
    if is_master and step % 50 == 0:
        norm = net.clip_grad_norm_(1.0)
        print("grad norm", norm.item())
    optim.step()
    optim.zero_grad(set_to_none=True)

dist.destroy_process_group()
