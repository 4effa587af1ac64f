import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(16, 8)
        self.dec = nn.Linear(4, 16)

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar

    def loss(self, x):
        rec, mu, logvar = self.forward(x)
        kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).mean()
        return (rec - x).pow(2).mean() + kl


class Runner:
    def __init__(self):
        self.model = DistributedDataParallel(VAE())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def train(self, n):
        for _ in range(n):
            loss = self.model.module.loss(torch.randn(8, 16))
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    Runner().train(20)
    dist.destroy_process_group()
