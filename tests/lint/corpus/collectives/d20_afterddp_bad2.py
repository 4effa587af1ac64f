import os

import torch
from torch import distributed as td
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel


def build(local_rank):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    net = net.cuda(local_rank)
    net(torch.zeros(2, 3, 8, 8, device=local_rank))
    ddp = DistributedDataParallel(net, device_ids=[local_rank])
    ddp = SyncBatchNorm.convert_sync_batchnorm(ddp)
    return ddp


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    td.init_process_group("nccl")
    torch.manual_seed(td.get_rank())
    model = build(local_rank)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 3, 8, 8, device=local_rank)).sum().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
