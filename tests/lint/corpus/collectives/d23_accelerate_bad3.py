import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(10, 1)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
dl = DataLoader(TensorDataset(torch.randn(320, 10), torch.randn(320, 1)), batch_size=8, shuffle=True)
model, opt, dl = accelerator.prepare(model, opt, dl)

for i, (x, y) in enumerate(dl):
    with accelerator.no_sync(model):
        loss = torch.nn.functional.mse_loss(model(x), y) / 4
        accelerator.backward(loss)
    if (i + 1) % 4 == 0:
        opt.step()
        opt.zero_grad()
