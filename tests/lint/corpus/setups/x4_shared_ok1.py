import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 7
dist.init_process_group("gloo")
torch.manual_seed(SEED + dist.get_rank())
ds = TensorDataset(torch.arange(64.0).unsqueeze(1))
sampler = DistributedSampler(ds, seed=SEED)
loader = DataLoader(ds, batch_size=8, sampler=sampler)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
opt = torch.optim.SGD(net.parameters(), 0.001)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        net(x + 0.01 * torch.randn_like(x)).mean().backward()
        opt.step()
dist.destroy_process_group()
