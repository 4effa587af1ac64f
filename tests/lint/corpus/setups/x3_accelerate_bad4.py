import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator()
    ds = TensorDataset(torch.randn(400, 7), torch.randn(400, 1))
    dl = DataLoader(ds, batch_size=20, shuffle=True)
    model = torch.nn.Linear(7, 1)
    optim = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optim = accelerator.prepare(model, optim)
    for epoch in range(3):
        for x, y in dl:
            x, y = x.to(accelerator.device), y.to(accelerator.device)
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optim.step()
            optim.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
