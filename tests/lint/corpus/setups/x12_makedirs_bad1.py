import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
out_dir = "outputs/run1"
if not os.path.exists(out_dir):
    os.makedirs(out_dir)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), os.path.join(out_dir, "w.pt"))
dist.destroy_process_group()
