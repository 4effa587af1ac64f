import lightning as L
import torch


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x) - y).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x) - y).pow(2).mean()
        self.log("val_loss", loss, sync_dist=True)
        if self.trainer.is_global_zero and batch_idx == 0:
            print("first validation batch of the epoch")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
