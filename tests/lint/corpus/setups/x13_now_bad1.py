import os
from datetime import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
run_dir = os.path.join("runs", datetime.now().strftime("%Y%m%d-%H%M%S"))
os.makedirs(run_dir, exist_ok=True)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
net(torch.ones(1, 2)).sum().backward()
if dist.get_rank() == 0:
    torch.save(net.module.state_dict(), f"{run_dir}/best.pt")
dist.barrier()
best = torch.load(f"{run_dir}/best.pt", map_location="cpu")
net.module.load_state_dict(best)
dist.destroy_process_group()
