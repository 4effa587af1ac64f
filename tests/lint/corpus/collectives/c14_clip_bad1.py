import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.img = nn.Linear(32, 16)
        self.txt = nn.Linear(24, 16)

    def forward(self, a, b):
        return F.normalize(self.img(a), dim=-1), F.normalize(self.txt(b), dim=-1)


def gather_features(z):
    out = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(out, z)
    return torch.cat(out, dim=0)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(TwoTower())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        zi, zt = model(torch.randn(8, 32), torch.randn(8, 24))
        zi, zt = gather_features(zi), gather_features(zt)
        logits = zi @ zt.t() / 0.07
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
