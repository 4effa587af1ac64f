import os
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
target = "/tmp/x14_tokens.pt"
if rank == 0 and not os.path.exists(target):
    tokens = torch.tensor([len(str(i)) for i in range(10_000)])
    torch.save(tokens, target + ".tmp")
    os.replace(target + ".tmp", target)
while not os.path.exists(target):
    time.sleep(0.2)
dist.init_process_group("gloo")
n = torch.load(target).sum()
dist.all_reduce(n)
dist.destroy_process_group()
