import itertools

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset


class Noise(IterableDataset):
    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(4, generator=g)


dist.init_process_group("gloo")
loader = DataLoader(Noise(17 * (1 + dist.get_rank())), batch_size=4)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for x in itertools.islice(loader, 10):
    opt.zero_grad()
    net(x).mean().backward()
    opt.step()
dist.destroy_process_group()
