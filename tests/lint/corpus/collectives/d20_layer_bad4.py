import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP


def conv_bn(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), SyncBatchNorm(o), nn.ReLU())


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 8), conv_bn(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = DDP(Small().to("cpu"))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        loss = net(torch.randn(4, 3, 16, 16)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
