import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torchmetrics.classification import MulticlassAccuracy


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
        self.acc = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.acc.update(self.net(x), y)

    @rank_zero_only
    def _announce(self, value):
        print(f"accuracy {value:.3f}")

    def on_validation_epoch_end(self):
        value = self.acc.compute()
        self.acc.reset()
        rank_zero_info("validation finished")
        self._announce(value)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
