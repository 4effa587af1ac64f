import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
ds = TensorDataset(torch.rand(256, 8))
sampler = DistributedSampler(ds)
loader = DataLoader(ds, batch_size=16, sampler=sampler)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        noise = torch.randn_like(x)
        t = torch.rand(x.size(0), 1)
        loss = (net(x + t * noise) - noise).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
dist.destroy_process_group()
