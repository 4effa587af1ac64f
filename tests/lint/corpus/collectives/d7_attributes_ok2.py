import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.num_classes = classes
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Net(3))
    opt = torch.optim.SGD([{"params": model.module.head.parameters(), "lr": 0.1}])
    for _ in range(4):
        y = torch.randint(0, model.module.num_classes, (6,))
        loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


main()
