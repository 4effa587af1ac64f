import torch
from torch import nn
from accelerate import Accelerator

acc = Accelerator()
model = nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = torch.utils.data.DataLoader(torch.randn(64, 4), 8)
opt, loader = acc.prepare(opt, loader)
model.to(acc.device)
for x in loader:
    loss = model(x).mean()
    acc.backward(loss)
    opt.step()
    opt.zero_grad()
