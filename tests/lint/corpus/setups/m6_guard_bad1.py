import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 1)

    def training_step(self, batch, idx):
        loss = self.fc(batch[0]).pow(2).mean()
        if self.global_rank == 0:
            self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    dl = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
    pl.Trainer(max_epochs=2, strategy="ddp", devices=2, accelerator="cpu").fit(Net(), dl)
