import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def multi_scale(outputs, target):
    total = torch.tensor(0.0)
    for w, o in zip((1.0, 0.5), outputs):
        total = total + w * (o - target).pow(2).mean()
    return total


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.a(x), self.b(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = multi_scale(model(torch.randn(3, 4)), torch.randn(3, 2))
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


main()
