import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(100, 4))
kw = dict(batch_size=4, shuffle=True, num_workers=2)
sampler = DistributedSampler(ds)
loader = DataLoader(ds, sampler=sampler, **kw)
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for ep in range(3):
    sampler.set_epoch(ep)
    for (x,) in loader:
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
dist.destroy_process_group()
