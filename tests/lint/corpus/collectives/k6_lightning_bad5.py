import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.fc(x), y)

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint(f"epoch{self.current_epoch}.ckpt")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    ds = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(Net(), DataLoader(ds, batch_size=16, shuffle=True))
