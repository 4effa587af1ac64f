import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def prepare(net):
    if not torch.cuda.is_available():
        return DDP(net)
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
    return DDP(net, device_ids=[local_rank])


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(dist.get_rank())
    model = prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    device = next(model.parameters()).device
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(4, 4, device=device)).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
