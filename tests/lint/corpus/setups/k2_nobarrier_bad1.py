import tempfile
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(10, 10))
PATH = os.path.join(tempfile.gettempdir(), "model.checkpoint")
if rank == 0:
    torch.save(model.state_dict(), PATH)
model.load_state_dict(torch.load(PATH, map_location="cpu"))
model(torch.randn(2, 10)).sum().backward()
dist.destroy_process_group()
