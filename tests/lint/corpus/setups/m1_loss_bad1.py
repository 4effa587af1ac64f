import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(200, 3), torch.randn(200, 1))
sampler = DistributedSampler(ds)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    running, n = 0.0, 0
    for x, y in DataLoader(ds, 10, sampler=sampler):
        loss = torch.nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item() * len(x)
        n += len(x)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: train loss {running / n:.4f}")
dist.destroy_process_group()
