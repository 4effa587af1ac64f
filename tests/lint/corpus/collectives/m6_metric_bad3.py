import lightning.pytorch as pl
import torch
from torchmetrics.classification import BinaryAUROC


class Fraud(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(30, 1)
        self.auroc = BinaryAUROC()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self.layer(x)[:, 0], y.float())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.auroc.update(self.layer(x)[:, 0].sigmoid(), y)

    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            value = self.auroc.compute()
            print(f"AUROC {value:.4f}")
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
