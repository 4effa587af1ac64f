import os

import torch
import torch.distributed as dist


def init():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    dist.barrier()


init()
x = torch.ones(1, device="cuda")
dist.all_reduce(x)
print(x.item())
dist.destroy_process_group()
