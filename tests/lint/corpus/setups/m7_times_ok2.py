import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

acc = Accelerator(cpu=True)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
net, opt, loader = acc.prepare(net, opt, loader)
steps = 2 * len(loader)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps * acc.num_processes)
sched = acc.prepare(sched)
for epoch in range(2):
    for (x,) in loader:
        acc.backward(net(x).pow(2).mean())
        opt.step()
        sched.step()
        opt.zero_grad()
acc.end_training()
