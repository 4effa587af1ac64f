import torch
import torch.distributed as dist
from torch.utils import data


class Stream(data.IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(start, self.n, step):
            yield torch.tensor([float(i)])


dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
opt = torch.optim.SGD(net.parameters(), 1e-6)
for x in data.DataLoader(Stream(1000), batch_size=10, num_workers=2):
    opt.zero_grad()
    net(x).mean().backward()
    opt.step()
dist.destroy_process_group()
