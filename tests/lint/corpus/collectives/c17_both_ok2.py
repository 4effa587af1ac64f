import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
hits = torch.tensor([5, 8])
dist.all_reduce(hits)
if dist.get_rank() == 0:
    print(hits.tolist())
dist.destroy_process_group()
