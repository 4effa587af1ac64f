import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def quick_test(net, device):
    net.eval()
    value = net(torch.randn(8, 4, device=device)).mean().item()
    net.train()
    return value


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net), device_ids=[device.index])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        opt.zero_grad()
        model(torch.randn(8, 4, device=device)).sum().backward()
        opt.step()
        if step % 20 == 0:
            if dist.get_rank() == 0:
                print(step, quick_test(model.module, device))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
