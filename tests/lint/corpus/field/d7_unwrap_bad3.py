import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.d = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        return self.d(self.e(x))

    def compute_loss(self, x):
        return (self(x) - x).pow(2).mean()


def unwrap(m):
    return m.module if hasattr(m, "module") else m


dist.init_process_group("gloo")
vae = DDP(VAE())
opt = torch.optim.Adam(vae.parameters())
for _ in range(10):
    loss = unwrap(vae).compute_loss(torch.randn(8, 4))
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
