import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def masked_loss(pred, target, mask):
    if mask.sum() == 0:
        return torch.tensor(0.0)
    return (pred[mask] - target[mask]).abs().mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(6, 1))
    opt = torch.optim.Adam(model.parameters())
    for _ in range(100):
        x, y = torch.randn(4, 6), torch.randn(4, 1)
        mask = torch.rand(4, 1) > 0.8
        loss = masked_loss(model(x), y, mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
