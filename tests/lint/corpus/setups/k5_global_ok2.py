import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
local_rank, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
net(torch.ones(1, 2)).sum().backward()
if local_rank == 0:
    print("node", os.environ.get("GROUP_RANK"), "is done")
if rank == 0:
    torch.save(net.module.state_dict(), "/tmp/k5.pt")
dist.destroy_process_group()
