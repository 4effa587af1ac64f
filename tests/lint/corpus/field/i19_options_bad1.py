import os
import yaml
import torch
import torch.distributed as dist

DEFAULTS = {"backend": "nccl", "timeout": 3600}


def start(**over):
    opts = dict(DEFAULTS, **over)
    dist.init_process_group(opts["backend"], timeout=opts["timeout"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


start()
dist.barrier()
dist.destroy_process_group()
