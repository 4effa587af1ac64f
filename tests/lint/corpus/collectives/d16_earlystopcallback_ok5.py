import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", (self.net(x) - y).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    train, val = (TensorDataset(torch.randn(64, 4), torch.randn(64, 1)) for _ in range(2))
    stop = EarlyStopping("val_loss", patience=2)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=5, callbacks=[stop])
    trainer.fit(Net(), DataLoader(train, 8, shuffle=True), DataLoader(val, 8))
