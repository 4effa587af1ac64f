import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def wrap(net):
    if torch.cuda.is_available():
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        return DDP(net.cuda(), device_ids=[local_rank])
    return DDP(net)


def main():
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(dist.get_rank())
    model = wrap(torch.nn.Linear(4, 1))
    device = next(model.parameters()).device
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(2, 4, device=device)).sum().backward()
        opt.step()
    dist.destroy_process_group()


main()
