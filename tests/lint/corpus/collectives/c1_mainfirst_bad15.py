import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def build_dataset(accelerator, n):
    x = torch.randn(n, 4)
    mean = accelerator.reduce(x.mean(0), reduction="mean")
    return TensorDataset(x - mean, torch.randn(n, 1))


accelerator = Accelerator()
with accelerator.main_process_first():
    data = build_dataset(accelerator, 128)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt, loader = accelerator.prepare(model, opt, DataLoader(data, batch_size=8, shuffle=True))
for x, y in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    opt.step()
    opt.zero_grad()
