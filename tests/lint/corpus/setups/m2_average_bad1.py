import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ds = TensorDataset(torch.randn(103, 2), torch.randint(0, 2, (103,)))
mine = Subset(ds, range(rank, len(ds), world))
net = torch.nn.Linear(2, 2)
accs = []
for x, y in DataLoader(mine, batch_size=16):
    with torch.no_grad():
        accs.append((net(x).argmax(1) == y).float().mean())
acc = torch.stack(accs).mean()
dist.all_reduce(acc)
acc /= world
if rank == 0:
    print("acc", acc.item())
dist.destroy_process_group()
