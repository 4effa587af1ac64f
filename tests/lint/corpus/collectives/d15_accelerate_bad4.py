import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(16, 1)
opt = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.randn(400, 16), torch.randn(400, 1)), batch_size=4, shuffle=True)
model, opt, loader = accelerator.prepare(model, opt, loader)

skipped = 0
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    if not torch.isfinite(loss):
        skipped += 1
        opt.zero_grad()
        continue
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
accelerator.print("done")
