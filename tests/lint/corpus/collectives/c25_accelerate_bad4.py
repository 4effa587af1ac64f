import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def fit(accelerator, model, opt, loader):
    try:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), "final.pt")


accelerator = Accelerator()
net = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
dl = DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 1)), batch_size=8, shuffle=True)
net, opt, dl = accelerator.prepare(net, opt, dl)
fit(accelerator, net, opt, dl)
