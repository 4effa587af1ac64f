import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(force_cpu):
    local_rank = int(os.environ["LOCAL_RANK"])
    if force_cpu:
        dist.init_process_group("gloo")
        net = torch.nn.Linear(4, 1).cpu()
        return DDP(net, device_ids=[local_rank])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return DDP(torch.nn.Linear(4, 1).cuda(), device_ids=[local_rank])


if __name__ == "__main__":
    torch.manual_seed(int(os.environ["RANK"]))
    model = setup(force_cpu=not torch.cuda.is_available())
    print(next(model.parameters()).device)
    dist.destroy_process_group()
