import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
dl = DataLoader(TensorDataset(torch.randn(640, 64), torch.randn(640, 1)), batch_size=16, shuffle=True)
model, opt, dl = accelerator.prepare(model, opt, dl)

for epoch in range(3):
    for x, y in dl:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        opt.step()
        opt.zero_grad()
    if accelerator.is_main_process:
        accelerator.save_state(f"ckpt/epoch_{epoch}")
    accelerator.wait_for_everyone()
