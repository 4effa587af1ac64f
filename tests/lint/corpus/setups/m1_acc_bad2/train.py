import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evaluate import accuracy

dist.init_process_group("gloo")
test = TensorDataset(torch.randn(100, 4), torch.randint(0, 3, (100,)))
loader = DataLoader(test, 10, sampler=DistributedSampler(test, shuffle=False))
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
acc = accuracy(net.module, loader)
if dist.get_rank() == 0:
    print("test accuracy:", acc)
    open("result.txt", "w").write(str(acc))
dist.destroy_process_group()
