import os

import torch.distributed as dist


def init():
    dist.init_process_group(backend=os.environ.get("DDP_BACKEND", "nccl"))


def get_rank():
    return dist.get_rank()
