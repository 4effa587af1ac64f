import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Reg(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        (x,) = batch
        return self.net(x).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
    L.Trainer(max_epochs=2, strategy="ddp", devices=2, accelerator="cpu", logger=False).fit(Reg(), loader)
