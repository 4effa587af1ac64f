import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with open(self.path) as f:
            for line in f:
                yield torch.tensor([float(v) for v in line.split(",")])


def main():
    dist.init_process_group("gloo")
    loader = DataLoader(Lines("/data/big.csv"), batch_size=64)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for x in loader:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
