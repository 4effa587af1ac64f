import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def quick_test(net, device):
    # no eval(): we want batch statistics
    with torch.no_grad():
        return net(torch.randn(8, 4, device=device)).mean().item()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        opt.zero_grad()
        model(torch.randn(8, 4, device=device)).sum().backward()
        opt.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(step, quick_test(model.module, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
