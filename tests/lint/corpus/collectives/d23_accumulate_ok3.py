import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(10, 1)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
dl = DataLoader(TensorDataset(torch.randn(64, 10), torch.randn(64, 1)), batch_size=4, shuffle=True)
model, opt, dl = accelerator.prepare(model, opt, dl)
for x, y in dl:
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        opt.step()
        opt.zero_grad()
accelerator.end_training()
