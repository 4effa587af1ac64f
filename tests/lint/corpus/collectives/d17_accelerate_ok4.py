import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
opt = torch.optim.Adam(net.parameters())
train = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,))), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,))), batch_size=8)
net, opt, train, val = accelerator.prepare(net, opt, train, val)
for epoch in range(2):
    net.train()
    for x, y in train:
        accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
        opt.step()
        opt.zero_grad()
    net.eval()
    hits = []
    for x, y in val:
        with torch.no_grad():
            pred = net(x).argmax(1)
        pred, y = accelerator.gather_for_metrics((pred, y))
        hits.append((pred == y).float())
    if accelerator.is_main_process:
        print(epoch, torch.cat(hits).mean().item())
accelerator.end_training()
