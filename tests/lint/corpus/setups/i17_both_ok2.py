import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
lengths = torch.tensor([torch.randint(1, 9, ()).item()])
dist.all_reduce(lengths, op=dist.ReduceOp.MAX)
grid = torch.zeros(int(lengths), device="cuda")
dist.all_reduce(grid)
dist.destroy_process_group()
