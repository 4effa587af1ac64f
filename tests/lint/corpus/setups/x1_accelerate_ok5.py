import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

acc = Accelerator(cpu=True)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
net, opt, loader = acc.prepare(net, opt, loader)
for epoch in range(3):
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        acc.backward(net(x).mean())
        opt.step()
acc.end_training()
