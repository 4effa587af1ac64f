import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
dl = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8, shuffle=True)
model, opt, dl = accelerator.prepare(model, opt, dl)
for epoch in range(2):
    for x, y in dl:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        opt.step()
        opt.zero_grad()
    if accelerator.is_main_process:
        os.makedirs("/tmp/acc_ckpt", exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(f"/tmp/acc_ckpt/epoch_{epoch}")
accelerator.end_training()
