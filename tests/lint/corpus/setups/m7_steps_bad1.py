import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

accelerator = Accelerator()
ds = TensorDataset(torch.randn(6400, 4), torch.randn(6400, 1))
loader = DataLoader(ds, batch_size=16, shuffle=True)
model = torch.nn.Linear(4, 1)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
model, opt, loader = accelerator.prepare(model, opt, loader)
total_steps = len(loader) * 3
sched = get_linear_schedule_with_warmup(opt, 100, total_steps)
sched = accelerator.prepare(sched)
for epoch in range(3):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        opt.step()
        sched.step()
        opt.zero_grad()
accelerator.end_training()
