import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Clf(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def training_step(self, b, _):
        self.log("lr", 1e-3, rank_zero_only=True)
        return torch.nn.functional.cross_entropy(self.fc(b[0]), b[1])

    def validation_step(self, b, _):
        acc = (self.fc(b[0]).argmax(1) == b[1]).float().mean()
        self.log("val_acc", acc, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


if __name__ == "__main__":
    ds = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    tr = L.Trainer(max_epochs=1, devices=2, strategy="ddp", accelerator="cpu", logger=False)
    tr.fit(Clf(), DataLoader(ds, 8), DataLoader(ds, 8))
