import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
test = TensorDataset(torch.randn(1001, 5, generator=g), torch.randint(0, 2, (1001,), generator=g))
mine = Subset(test, range(rank, len(test), world))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 2))
counts = torch.zeros(2)
net.eval()
with torch.no_grad():
    for x, y in DataLoader(mine, batch_size=50):
        counts[0] += (net.module(x).argmax(1) == y).sum()
        counts[1] += len(y)
dist.all_reduce(counts)
if rank == 0:
    print("accuracy", (counts[0] / counts[1]).item())
dist.destroy_process_group()
