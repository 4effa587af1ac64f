import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def phase(net, steps):
    model = DDP(net)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    net[0].requires_grad_(False)
    phase(net, 3)
    net[0].requires_grad_(True)
    phase(net, 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
