import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(100, 4))
loader = DataLoader(ds, batch_size=4, sampler=RandomSampler(ds))
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for ep in range(3):
    for (x,) in loader:
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
dist.destroy_process_group()
