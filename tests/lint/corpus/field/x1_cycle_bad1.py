import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, distributed


def cycle(dl):
    while True:
        for b in dl:
            yield b


dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(1000, 4))
dl = cycle(DataLoader(ds, 8, sampler=distributed.DistributedSampler(ds, shuffle=True)))
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5000):
    (x,) = next(dl)
    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
dist.destroy_process_group()
