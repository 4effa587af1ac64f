import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
plateau = lr_scheduler.ReduceLROnPlateau(opt, patience=2)
for epoch in range(30):
    total = 0.0
    for _ in range(10):
        loss = net(torch.randn(4, 4)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    plateau.step(total / 10)
dist.destroy_process_group()
