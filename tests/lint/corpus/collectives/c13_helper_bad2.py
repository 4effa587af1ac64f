import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def reduce_mean(t):
    dist.all_reduce(t)
    t /= dist.get_world_size()
    return t


class Trainer:
    def __init__(self, net):
        self.net = DDP(net)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.history = []

    def step(self, x, y):
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        loss = reduce_mean(loss)
        self.history.append(loss.item())
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    t = Trainer(torch.nn.Linear(6, 3))
    for _ in range(10):
        t.step(torch.randn(8, 6), torch.randint(0, 3, (8,)))
    if dist.get_rank() == 0:
        print(t.history[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
