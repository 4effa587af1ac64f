import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(net):
    net.eval()
    with torch.no_grad():
        value = net(torch.randn(16, 4)).mean().item()
    net.train()
    return value


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net_without_ddp = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net = DDP(net_without_ddp)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for _ in range(3):
            opt.zero_grad()
            net(torch.randn(4, 4)).sum().backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, evaluate(net_without_ddp))
        dist.barrier()
    dist.destroy_process_group()


main()
