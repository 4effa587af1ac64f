import lightning as L
import torch


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.bad_epochs = 0
        self.best = float("inf")
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x) - y).pow(2).mean()
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        mean = torch.stack(self.outputs).mean().item()
        self.outputs.clear()
        if self.global_rank == 0:
            self.bad_epochs = 0 if mean < self.best else self.bad_epochs + 1
            self.best = min(mean, self.best)
            if self.bad_epochs > 2:
                self.trainer.should_stop = True

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
