import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
opt = torch.optim.Adam(net.parameters())
train_dl = DataLoader(TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,))), batch_size=16, shuffle=True)
net, opt, train_dl = accelerator.prepare(net, opt, train_dl)
val_x, val_y = torch.randn(64, 8), torch.randint(0, 2, (64,))

for epoch in range(3):
    net.train()
    for x, y in train_dl:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
    if accelerator.is_main_process:
        net.eval()
        with torch.no_grad():
            pred = net(val_x.to(accelerator.device)).argmax(1).cpu()
        print(epoch, (pred == val_y).float().mean().item())
    accelerator.wait_for_everyone()
