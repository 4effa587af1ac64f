import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def sample(model, steps=3):
    x = torch.randn(1, 6)
    for _ in range(steps):
        x = x - 0.1 * model(x)
    return x.detach()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for it in range(10):
        loss = model(torch.randn(8, 6)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it == 0 and dist.get_rank() == 0:
            print("first sample", sample(model).tolist())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
