import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.keep = 1.0

    def forward(self, x):
        return self.fc(x) * self.keep


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Drop())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        model.module.keep = 1.0 - 0.1 * epoch
        opt.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        opt.step()
    dist.destroy_process_group()


main()
