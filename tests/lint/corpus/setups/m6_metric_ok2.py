import lightning as L
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset


class Clf(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def training_step(self, b, _):
        return torch.nn.functional.cross_entropy(self.fc(b[0]), b[1])

    def validation_step(self, b, _):
        self.acc(self.fc(b[0]), b[1])
        self.log("val_acc", self.acc, on_epoch=True)

    def on_validation_epoch_end(self):
        value = self.trainer.callback_metrics.get("val_acc")
        if self.trainer.is_global_zero:
            print("val", value)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    ds = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
    tr = L.Trainer(max_epochs=1, devices=2, strategy="ddp", accelerator="cpu", logger=False)
    tr.fit(Clf(), DataLoader(ds, 8), DataLoader(ds, 8))
