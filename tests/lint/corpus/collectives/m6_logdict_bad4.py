import lightning as L
import torch


class Regressor(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self(x) - y).pow(2).mean()

    def test_step(self, batch, batch_idx):
        x, y = batch
        err = (self(x) - y).detach()
        if self.trainer.global_rank > 0:
            return
        self.log_dict({"mae": err.abs().mean(), "bias": err.mean()}, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
