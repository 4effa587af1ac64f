import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ds = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
sampler = DistributedSampler(ds)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    acc = torch.zeros(2)
    for x, y in DataLoader(ds, 8, sampler=sampler):
        loss = torch.nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        acc += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(acc)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {(acc[0] / acc[1]).item():.4f}")
dist.destroy_process_group()
