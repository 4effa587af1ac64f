import torch
import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Clf(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def training_step(self, b, _):
        return torch.nn.functional.cross_entropy(self.fc(b[0]), b[1])

    def validation_step(self, b, _):
        acc = (self.fc(b[0]).argmax(1) == b[1]).float().mean()
        self.log("val_acc", acc)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def loader():
    return DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,))), batch_size=8)


if __name__ == "__main__":
    cbs = [EarlyStopping("val_acc", mode="max"), ModelCheckpoint(monitor="val_acc", mode="max")]
    L.Trainer(max_epochs=5, devices=4, strategy="ddp", accelerator="gpu", callbacks=cbs).fit(Clf(), loader(), loader())
