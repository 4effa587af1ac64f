import os
import torch
import torch.distributed as dist

local_rank = int(os.environ.get("LOCAL_RANK", 0)),
batch_size = 32,
dist.init_process_group("gloo")
loader = torch.utils.data.DataLoader(torch.randn(100, 3), batch_size=batch_size)
for x in loader:
    s = x.sum()
    dist.all_reduce(s)
dist.destroy_process_group()
