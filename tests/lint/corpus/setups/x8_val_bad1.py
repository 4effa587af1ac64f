import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
g = torch.Generator().manual_seed(0)
test = TensorDataset(torch.randn(1001, 5, generator=g), torch.randint(0, 2, (1001,), generator=g))
loader = DataLoader(test, batch_size=50, sampler=DistributedSampler(test, shuffle=False))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 2))
net.eval()
counts = torch.zeros(2)
with torch.no_grad():
    for x, y in loader:
        counts[0] += (net(x).argmax(1) == y).sum()
        counts[1] += len(y)
dist.all_reduce(counts)
if dist.get_rank() == 0:
    print("accuracy", (counts[0] / counts[1]).item())
dist.destroy_process_group()
